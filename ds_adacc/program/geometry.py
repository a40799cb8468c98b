"""Where a view lies in memory, relative to its root: the tensor that it is a view of."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ds_adacc.python_state.tensor_marks import stride_of


@dataclass(frozen=True)
class Geometry:
    """Size, stride and dtype; `start` is the distance in bytes from the first byte of the root."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @classmethod
    def of(cls, tensor: torch.Tensor, origin: int | None = None) -> Geometry:
        """The geometry of `tensor`, relative to the address `origin` (None: its own first byte)."""
        start = 0 if origin is None or tensor.numel() == 0 else tensor.data_ptr() - origin
        return cls(tuple(tensor.shape), stride_of(tensor), tensor.dtype, start)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @functools.cached_property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if self.numel == 0:
            return 0
        last = sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, without those between them."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the order of their indices, without gaps."""
        return _are_nested(zip(reversed(self.stride), reversed(self.size), strict=True))

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill their span without gaps or overlap, in some order of the dimensions."""
        return is_dense(self.size, self.stride)

    def view(self, root: torch.Tensor) -> torch.Tensor:
        """The view of `root` with this geometry, relative to its first byte: `root` itself if that is the whole."""
        if self.start == 0 and stride_of(root) == self.stride and root.shape == self.size and root.dtype is self.dtype:
            return root
        return self.part_of(root)

    def part_of(self, root: torch.Tensor) -> torch.Tensor:
        """As `view`, of a root that is known to look otherwise."""
        if root.dtype is self.dtype:
            offset = root.storage_offset()
            if self.start:
                offset += self.start // self.dtype.itemsize
            return root.as_strided(self.size, self.stride, offset)
        offset = (root.storage_offset() * root.element_size() + self.start) // self.dtype.itemsize
        alias = torch.empty(0, dtype=self.dtype, device=root.device)
        return alias.set_(root.untyped_storage(), offset, self.size, self.stride)

    def seen_from(self, part: Geometry) -> Geometry:
        """This geometry relative to the first byte of `part`, where both are relative to one root."""
        return Geometry(self.size, self.stride, self.dtype, self.start - part.start)


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """As of `Geometry`."""
    return _are_nested(sorted(zip(stride, size, strict=True)))


def _are_nested(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether each dimension, a pair of stride and length, steps over just what those before it fill."""
    expected = 1
    for step, length in dimensions:
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return True


def cover(views: Iterable[Geometry], whole: Geometry) -> bool:
    """Whether the views, whose starts are seen from `whole`, show all elements between its first and its last one."""
    seen = [view for view in views if view.numel and view.dtype is whole.dtype]
    elements = whole.span // whole.dtype.itemsize
    if any(view.is_dense and view.numel == elements for view in seen):
        return True
    # Elements are marked in runs, as long as all views allow: those of a query are as long as a head is wide.
    run = max(math.gcd(elements, *map(_run, seen)), 1)
    marks = torch.zeros(elements // run, dtype=torch.bool)
    for view in seen:
        steps = [(n // run, 1) if step == 1 else (n, step // run) for n, step in _steps(view)]
        start = view.start // view.dtype.itemsize // run
        marks.as_strided([n for n, _ in steps], [step for _, step in steps], start).fill_(True)
    return bool(marks.all())


def _run(view: Geometry) -> int:
    """The most elements of which the view shows all or none, wherever they begin at a multiple of that number."""
    lengths = [n for n, step in _steps(view) if step == 1]
    others = (step for _, step in _steps(view) if step != 1)
    return math.gcd(view.start // view.dtype.itemsize, lengths[0], *others) if len(lengths) == 1 else 1


def _steps(view: Geometry) -> list[tuple[int, int]]:
    """The length and the stride of each dimension that leads to other elements."""
    return [(n, step) for n, step in zip(view.size, view.stride, strict=True) if n > 1 and step]


def why_not_plain(tensor: torch.Tensor) -> str | None:
    """What kind of tensor it is, if its memory cannot be described by a geometry; None if it can."""
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        return f"tensor of type {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
    if tensor.is_quantized:
        return "quantized tensor"
    return "tensor without data, on the device 'meta'" if tensor.is_meta else None


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of `tensor` and of the byte after its last."""
    start = tensor.data_ptr()
    return start, start + Geometry.of(tensor).span


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of the tensor's storage, while that is alive."""
    return tensor.untyped_storage()._cdata


def are_one_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same view of the same memory."""
    return storage_of(one) == storage_of(other) and Geometry.of(one, 0) == Geometry.of(other, 0)
