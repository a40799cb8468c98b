"""What every codec of every backend offers: compress, decompress, and what they cost in bytes, known beforehand."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .width import INT4, INT8, Width

Payload = tuple[Tensor, ...]

# By codec name: the form (what is done with a tensor), and the width of a code if the tensor is quantized.
FORMS: dict[str, tuple[str, Width | None]] = {
    **{
        form + width.suffix: (form, width)
        for width in (INT4, INT8)
        for form in ("group", "token", "channel", "asymmetric", "outlier")
    },
    "bits": ("bits", None),
}


class Codec(ABC):
    """A pair of functions that shrink a tensor and restore it.

    A codec keeps no tensors between calls but those that tell its outlier channels. It allocates with plain torch on
    the tensor's device, and never makes the host wait for the device. No payload and no result requires a gradient. A
    tensor's channels are its last dimension, its rows all the others; a 0-dimensional tensor is one row of one channel.

    `generator`: the CPU generator from which stochastic rounding draws its seeds; None: torch's default one.
    `form`: what the codec does, without the width. `dtypes`: those that it takes.
    """

    generator: torch.Generator | None = None
    form: ClassVar[str]
    lossless: ClassVar[bool]
    dtypes: ClassVar[tuple[torch.dtype, ...]]

    @property
    def name(self) -> str:
        """The codec's name, as for `ds_adacc.kernels.make_codec`."""
        return self.form

    def compress(self, x: Tensor) -> Payload:
        """Return the payload of `x`: contiguous, of any shape, of a dtype in `dtypes`. `x` does not change.

        Raises TypeError for another dtype, ValueError if `x` is not contiguous.
        """
        self._check(x.dtype)
        if not x.is_contiguous():
            raise ValueError(
                f"codec {self.name!r} takes contiguous tensors; got strides {x.stride()} for shape {tuple(x.shape)}"
            )
        return self._compress(x)

    def decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a fresh contiguous tensor of the `shape` and `dtype` that `payload` was compressed from.

        Raises TypeError for a dtype the codec does not take.
        """
        self._check(dtype)
        return self._decompress(payload, shape, dtype)

    @abstractmethod
    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the exact number of bytes in the payload of a tensor of this shape and dtype."""

    @abstractmethod
    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return a bound on the bytes that either call takes besides the tensor and its payload."""

    @abstractmethod
    def _compress(self, x: Tensor) -> Payload: ...

    @abstractmethod
    def _decompress(self, payload: Payload, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def _check(self, dtype: torch.dtype) -> None:
        if dtype not in self.dtypes:
            valid = ", ".join(map(str, self.dtypes))
            raise TypeError(f"codec {self.name!r} does not take {dtype}; it takes {valid}")


def rows_and_channels(shape: Sequence[int]) -> tuple[int, int]:
    """Return how many rows and channels a shape has."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw the seed of one stochastic compression, in [0, 2^63), from `generator`; None: torch's default CPU one."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))


def by_form(*classes: type[Codec]) -> dict[str, type[Codec]]:
    """Return a backend's codec classes by their form, as `make` wants them."""
    return {codec.form: codec for codec in classes}


def make(
    classes: Mapping[str, Callable[..., Codec]],
    name: str,
    group_size: int,
    channels: Tensor | None,
    scale: str,
    rounding: str,
    **others: object,
) -> Codec:
    """Return the codec `name` of the backend whose classes, by form, are `classes`.

    The other arguments are those of `ds_adacc.kernels.make_codec`; `others` go to the backend's classes as they are.
    """
    form, width = FORMS[name]
    if width is None:
        return classes[form](**others)
    taken = {
        "token": (scale, rounding),
        "asymmetric": (group_size, rounding),
        "outlier": (group_size, channels, scale, rounding),
    }
    return classes[form](*taken.get(form, (group_size, scale, rounding)), width, **others)
