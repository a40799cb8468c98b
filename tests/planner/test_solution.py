"""How bytes are shown."""

import pytest

from ds_adacc.planner import human_bytes

KIB = 1024


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (KIB**2 - 6, "1023.99 KiB"),
        (KIB**2 - 1, "1.00 MiB"),
        (5 * KIB**3, "5.00 GiB"),
        (3000 * KIB**4, "3000.00 TiB"),
        (-KIB, "-1.00 KiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_below_them(nbytes, shown):
    assert human_bytes(nbytes) == shown
