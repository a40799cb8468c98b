"""What blocks must have in common to be of one type."""

import pytest
import torch
import torch.nn.functional as F
from recorded import captured
from torch import nn

from ds_adacc.profile.block_graph import block_graph


class Residual(nn.Module):
    """A layer that saves the same tensors whether its weight is trained or not."""

    def __init__(self, layer, is_trained):
        super().__init__()
        self.layer = layer
        self.layer.weight.requires_grad_(is_trained)

    def forward(self, x):
        return x + F.gelu(self.layer(x))


LAYERS = {
    "convolution": (lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.randn(1, 64, 4, 4)),
    "norm": (lambda: nn.LayerNorm(64, bias=False), torch.randn(2, 64)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_block_with_a_frozen_weight_is_of_a_type_of_its_own(name):
    """Its backward makes no gradient of the weight, so it takes less memory."""
    make, x = LAYERS[name]
    recordings = {
        is_trained: [captured(Residual(make(), is_trained), x.clone().requires_grad_()).recording for _ in range(2)]
        for is_trained in (True, False)
    }
    assert all(one.digest == other.digest for one, other in recordings.values())
    bytes_of = {is_trained: block_graph(one).events[-1].gradient_bytes for is_trained, (one, _) in recordings.items()}
    assert bytes_of[True] > bytes_of[False]
    assert recordings[True][0].digest != recordings[False][0].digest
