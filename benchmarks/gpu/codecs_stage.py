"""Stage `codecs`: throughput of every codec on large tensors, as shares of the time that the ideal bytes take."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import stage
import throughput
import torch
from rows import Row, Rows

from ds_adacc.kernels import CODECS

SIZES = (128, 512, 32)  # MiB; the most telling one comes first
DTYPES = (torch.bfloat16, torch.float32)


def measure(rows: Rows, device: torch.device, folder: Path, rehearses: bool) -> None:
    """A row for each size, dtype and codec; in a rehearsal, of 1 MiB."""
    if rehearses:
        throughput.SECONDS, throughput.ROUNDS, throughput.CALLS = 0.01, (2, 3), 3
    clock = throughput.HostClock() if rehearses else throughput.StreamClock(device)
    for mebibytes, dtype, codec in product((1,) if rehearses else SIZES, DTYPES, CODECS):
        name = f"{codec} {str(dtype).removeprefix('torch.')} {mebibytes} MiB"
        rows.measure(name, lambda of=(codec, dtype, device.type, mebibytes): right(*of, clock, device))


def right(*of: object) -> Row:
    """The figures of a codec. Raises AssertionError if it does not give the reference's bits."""
    row = throughput.measure(*of)
    assert "wrong" not in row, row["wrong"]
    return row


if __name__ == "__main__":
    stage.run("codecs", measure)
