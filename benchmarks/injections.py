"""Changes to a GPT that leave its function as it is, but not the tensors that its backward needs.

Large models grow such tensors in training; a small one does not, so they are put in:

* `norm`: two channels of each group of 128 of a LayerNorm's output are shifted by +R and -R. The bias of the next
  Linear takes the shift back.
* `key`: two channels of each head's keys are shifted by +A and -A. The softmax of attention does not see it.
* `units`: the bias of dead units of the MLP is raised, so their activation is an outlier that nothing reads.

The entries that carry a shift are frozen: the biases raised, and the weights that read a shifted channel or a dead
unit. So the function stays independent of the shift while everything else trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

GROUP = 128
NORM_CHANNELS = (17, 83)  # of each group
KEY_CHANNELS = (11, 37)  # of each head
DEAD_UNITS = 8  # of each MLP


@dataclass(frozen=True)
class Injection:
    """How far to shift the LayerNorm's channels, the key's channels and the dead units; 0: not at all."""

    norm: float = 0.0
    key: float = 0.0
    units: float = 0.0


INJECTIONS = {
    "plain": Injection(),
    "norm-20": Injection(norm=20.0),
    "norm-60": Injection(norm=60.0),
    "key-40": Injection(key=40.0),
    "key-100": Injection(key=100.0),
    "units-60": Injection(units=60.0),
    "all": Injection(norm=60.0, key=100.0, units=60.0),
}


class Frozen:
    """Entries of parameters, selected by masks, that training leaves as they were when this was made."""

    def __init__(self, masks: Mapping[nn.Parameter, Tensor]) -> None:
        self._held = [(parameter, mask, parameter.detach().clone()) for parameter, mask in masks.items()]

    def silence(self) -> None:
        """Zero the gradients of these entries, so that they count in no norm."""
        for parameter, mask, _ in self._held:
            parameter.grad.masked_fill_(mask, 0.0)

    @torch.no_grad()
    def restore(self) -> None:
        """Give these entries their values back: momentum and weight decay move them without a gradient too."""
        for parameter, mask, values in self._held:
            parameter.copy_(torch.where(mask, values, parameter))


class _Injector:
    """Shifts entries, and notes the ones to freeze."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.masks: dict[nn.Parameter, Tensor] = {}

    def freeze(self, parameter: nn.Parameter, index: Tensor | tuple[slice, Tensor]) -> None:
        mask = self.masks.setdefault(parameter, torch.zeros_like(parameter, dtype=torch.bool))
        mask[index] = True

    def shift_norm(self, norm: nn.LayerNorm, reader: nn.Linear, size: float) -> None:
        starts = range(0, norm.normalized_shape[0], GROUP)
        channels, shifts = self.alternating([start + c for start in starts for c in NORM_CHANNELS], size, norm.bias)
        norm.bias[channels] += shifts
        reader.bias -= reader.weight[:, channels] @ shifts
        self.freeze(norm.bias, channels)
        self.freeze(reader.weight, (slice(None), channels))

    def shift_keys(self, qkv: nn.Linear, heads: int, size: float) -> None:
        width = qkv.in_features
        starts = range(width, 2 * width, width // heads)  # queries, keys and values follow one another
        channels, shifts = self.alternating([start + c for start in starts for c in KEY_CHANNELS], size, qkv.bias)
        qkv.bias[channels] += shifts
        self.freeze(qkv.bias, channels)

    def raise_units(self, mlp: nn.Sequential, size: float) -> None:
        units = dead_units(mlp).to(self.device)
        mlp[0].bias[units] += size
        self.freeze(mlp[0].bias, units)

    def alternating(self, channels: list[int], size: float, like: Tensor) -> tuple[Tensor, Tensor]:
        signs = [size if number % 2 == 0 else -size for number in range(len(channels))]
        return torch.tensor(channels, device=self.device), torch.tensor(signs, dtype=like.dtype, device=self.device)


def dead_units(mlp: nn.Sequential) -> Tensor:
    """The units whose output weights are zero from the start, spread evenly."""
    hidden = mlp[0].out_features
    return torch.arange(0, hidden, hidden // DEAD_UNITS)


@torch.no_grad()
def kill_units(model: nn.Module) -> None:
    """Zero the output weights of each block's dead units. A new model needs this before it trains."""
    for block in model.blocks:
        block.mlp[2].weight[:, dead_units(block.mlp)] = 0.0


@torch.no_grad()
def inject(model: nn.Module, injection: Injection) -> Frozen:
    """Change the GPT of examples/train.py in place. Returns the entries to freeze; dead units are always among them."""
    injector = _Injector(next(model.parameters()).device)
    for block in model.blocks:
        injector.freeze(block.mlp[2].weight, (slice(None), dead_units(block.mlp).to(injector.device)))
        if injection.norm:
            injector.shift_norm(block.norm1, block.attention.qkv, injection.norm)
            injector.shift_norm(block.norm2, block.mlp[0], injection.norm)
        if injection.key:
            injector.shift_keys(block.attention.qkv, block.attention.heads, injection.key)
        if injection.units:
            injector.raise_units(block.mlp, injection.units)
    return Frozen(injector.masks)
