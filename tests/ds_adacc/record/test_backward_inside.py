"""What a backward within a block reads of Python is guarded, on every device."""

import pytest
import torch
from recorded import captured

ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SCALE = 2.0


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * SCALE


def block(x):
    (force,) = torch.autograd.grad(Scaled.apply(x).sum(), x, create_graph=True)
    return (force * x).tanh()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_a_number_that_a_backward_inside_reads_is_guarded(device):
    found = captured(block, torch.randn(4, 8, device=device, requires_grad=True))
    assert any(op.short_name == "cos" for op in found.recording.ops)
    assert any(place.endswith(".SCALE") for place in found.watch.reads.places)
