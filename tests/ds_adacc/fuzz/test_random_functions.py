"""Random blocks of opaque Functions: those that mutate, keep state, draw numbers, raise. No policy changes a bit."""

from collections import Counter

import pytest
from fuzz.functions import HARMFUL, HARMLESS, Program, check

COUNT, BATCH = 100, 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, COUNT, BATCH))
def test_no_policy_changes_a_bit(start):
    seen, failures = Counter(), []
    for seed in range(start, start + BATCH):
        try:
            seen.update(check(seed))
        except Exception as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}\n{Program(seed).steps}")
    assert not failures, "\n\n".join([f"{len(failures)} of {BATCH} cases fail", *failures])
    assert not [trait for trait in (*HARMLESS, *HARMFUL, "raises") if not seen[trait]], seen
    assert seen["replayed"] >= BATCH / 2 and seen["refused"] >= BATCH / 10 and seen["not recorded"] <= BATCH / 4
