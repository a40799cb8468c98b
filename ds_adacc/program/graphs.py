"""Graphs of torch.compile: each is an `autograd.Function` that AOTAutograd makes, and is run again as one (Rule R17).

The kernels inside are unseen, but the graph as a whole takes all that it reads, weights too, as arguments. Which graph
a call of compiled code runs is Dynamo's choice: it may compile another one for the same arguments at any time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ds_adacc.program.geometry import span

Extent = tuple[int, int]  # of memory, seen from a tensor that lies in it: where it begins, and its length, in elements
_PLACE = ("torch._functorch._aot_autograd.runtime_wrappers", "CompiledFunction")
_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"
# Why something must not run once more: `{}` is "it", or "its backward".
RUN_AS_CUDA_GRAPH = (
    'torch.compile runs {} as a CUDA graph (mode="reduce-overhead" or "max-autotune"), and a second run overwrites '
    "what the first has made"
)
_NUMBERS = "_ds_adacc_numbers"  # an attribute of autograd's node


class GraphRun(NamedTuple):
    """A call of a graph: its Function, and the numbers that it is given, as the length of a text."""

    cls: type
    numbers: tuple[float, ...]


def is_graph(cls: type) -> bool:
    """Whether the Function is a graph of torch.compile."""
    return (getattr(cls, "__module__", None), cls.__name__) == _PLACE


def written_by(cls: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """The arguments that a graph writes to, as AOTAutograd says. If it does not say which, all tensors among them.

    Neither their versions nor their bits tell: AOTAutograd counts the writes before the graph runs, and a kernel may
    write what is there already.
    """
    written = cls.metadata.mutated_graph_handled_indices
    if len(cls.metadata.input_info) == len(args):
        return [args[index] for index in written]
    return [arg for arg in args if isinstance(arg, torch.Tensor)] if written else []


def numbers_in(args: Iterable[Any]) -> tuple[float, ...]:
    """The numbers among the arguments of a graph."""
    return tuple(arg for arg in args if isinstance(arg, int | float))


def keep_numbers(cls: type[torch.autograd.Function], node: Any, args: Sequence[Any]) -> None:
    """Store the numbers among `args` on autograd's `node` of this call, and have every later call of the graph do so.

    Dynamo chooses them: they may be lengths, or numbers that the Python function reads, which does not run. AOTAutograd
    has made the class for this graph alone.
    """
    if not numbers_in(args):
        return
    setattr(node, _NUMBERS, numbers_in(args))
    forward = cls.forward
    if hasattr(forward, _NUMBERS):
        return

    @functools.wraps(forward)
    def keeping(ctx: Any, *given: Any) -> Any:
        setattr(ctx, _NUMBERS, numbers_in(given))
        return forward(ctx, *given)

    setattr(keeping, _NUMBERS, True)
    cls.forward = staticmethod(keeping)


def run_of(node: Any) -> GraphRun | None:
    """The call of a graph that autograd's node is of, if any. Of a graph that was never recorded, without numbers."""
    cls = getattr(node, "_forward_cls", None)
    return GraphRun(cls, getattr(node, _NUMBERS, ())) if cls is not None and is_graph(cls) else None


def extents(saved: Sequence[torch.Tensor], kept: Iterable[torch.Tensor]) -> tuple[Extent | None, ...]:
    """For each saved tensor, the memory to hold in its place; None: the tensor itself.

    A graph saves views, as of the query, the key and the value that one product has made. Each keeps all memory of its
    storage. So the first of them stands for all that memory. Those of tensors `kept` anyway are left as they are.
    """
    others = {tensor.untyped_storage().data_ptr() for tensor in kept}
    views: dict[int, list[int]] = {}
    for number, tensor in enumerate(saved):
        if tensor.numel():  # an empty tensor has no address
            views.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
    found: list[Extent | None] = [None] * len(saved)
    for storage, numbers in views.items():
        first = saved[numbers[0]]
        numel, rest = divmod(first.untyped_storage().nbytes(), first.element_size())
        low, high = span(first)
        is_all = len(numbers) == 1 and high - low == numel * first.element_size()
        if not (is_all or rest or storage in others):
            found[numbers[0]] = -first.storage_offset(), numel
    return tuple(found)


def extended(tensor: torch.Tensor, extent: Extent | None) -> torch.Tensor:
    """The memory of this extent, as one dimension; None: the tensor."""
    if extent is None:
        return tensor
    start, numel = extent
    return tensor.as_strided((numel,), (1,), tensor.storage_offset() + start)


def run_in_cuda_graphs(device: torch.device) -> bool:
    """Whether torch.compile runs graphs as CUDA graphs there."""
    trees = sys.modules.get(_CUDA_GRAPHS)
    if trees is None or device.type != "cuda":
        return False
    # Torch's own function for this fails in threads in which nothing was compiled.
    containers = getattr(trees.local, "tree_manager_containers", {})
    return device.index in containers and containers[device.index].tree_manager is not None
