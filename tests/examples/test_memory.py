"""PeakMemory sees what was allocated, also when it is gone again."""

import pytest
import torch
from memory import PeakMemory

MEBIBYTE = 2**20
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def allocate(mebibytes, device):
    """Touch that much memory, and free it."""
    torch.ones(mebibytes * MEBIBYTE // 4, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_is_seen_after_it_is_over(device):
    memory = PeakMemory(torch.device(device))
    allocate(1, device)
    memory.start()
    allocate(64, device)
    assert 63 * MEBIBYTE < memory.peak_bytes() < 72 * MEBIBYTE


@pytest.mark.parametrize("device", DEVICES)
def test_start_forgets_earlier_peaks_and_what_is_in_use(device):
    memory = PeakMemory(torch.device(device))
    kept = torch.ones(64 * MEBIBYTE // 4, device=device)
    allocate(64, device)
    memory.start()
    assert memory.peak_bytes() < 8 * MEBIBYTE
    assert kept[-1] == 1
