"""On a CUDA device: while the ranks have yet to agree on a plan, what a call saves lies on the host."""

import pytest
import torch

from ds_adacc.program.slots import keep
from ds_adacc.whole_blocks.host_copies import HostCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_it_lies_on_the_host_until_backward_asks():
    x = torch.randn(1 << 20, device="cuda")
    slot, expected = HostCopies(keep).pack(x), x.cpu()
    before = torch.cuda.memory_allocated()
    del x
    assert torch.cuda.memory_allocated() == before - (1 << 22)
    assert slot.unpack().is_cuda
    assert torch.equal(slot.unpack().cpu(), expected)
    assert torch.cuda.memory_allocated() == before - (1 << 22)
