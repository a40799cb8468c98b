"""Whether code of torch.compile runs in a block that is recorded. Its kernels bypass the dispatcher.

A graph is replayed as a whole. What Python runs beside it is replayed as in other blocks, if the graph tells in each
call that the same code of Dynamo's runs again (Rule R17).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType, FrameType

from ds_adacc.program.recording import Position
from ds_adacc.python_state.libraries import is_library
from ds_adacc.python_watch.callers import COMPILED_CODE
from ds_adacc.record.frames import frames_of_block, module_and_function

_GRAPH = "__compiled_fn"  # how Dynamo names the global by which its code calls a graph
_GRAPHS = ("torch._functorch._aot_autograd", "torch.fx.", "torch._inductor.")  # what runs a graph; or generated code
_DYNAMO_IS_OFF = ("torch._dynamo.eval_frame", "_fn")  # what runs a function with `torch.compiler.disable`


class _Kernel:
    """In place of the operator that made a value, where a kernel made it that the dispatcher did not see."""

    def __str__(self) -> str:
        return "kernel"

    def __call__(self) -> None:
        raise RuntimeError("a kernel was recorded that cannot be replayed; this is a bug in ds_adacc")


KERNEL = _Kernel()


class CompiledCode:
    """What of torch.compile's code has run so far in the call that is recorded.

    `began_at`: the first position that it may have saved; None: none has run.
    """

    def __init__(self, positions: Sequence[Position]) -> None:
        """`positions`: what autograd has saved so far, which grows."""
        self._positions = positions
        self.began_at: int | None = None
        self._codes_of_graphs: dict[int, CodeType] = {}  # Dynamo's, each with the graph that it has run

    def note_graph(self) -> None:
        """Note that a graph begins."""
        self._begin()
        code = code_of_graph()
        if code is not None:
            self._codes_of_graphs[id(code)] = code  # which may hold what has no hash

    def runs_unknown(self) -> bool:
        """Whether such code runs now, and no graph of it tells whether later calls run the same (Rule R17)."""
        if not in_compiled_code():
            return False
        self._begin()
        return id(code_beside_graphs()) not in self._codes_of_graphs

    def _begin(self) -> None:
        if self.began_at is None:
            self.began_at = len(self._positions)


def in_guards() -> bool:
    """Whether Dynamo checks which of its code fits the call, in a function that it has generated.

    Some versions make tensors there of floats that vary, and read them again. It is no part of the block.
    """
    return any(frame.f_code.co_name == "guard" and "__name__" not in frame.f_globals for frame in frames_of_block())


def in_compiled_code() -> bool:
    """Whether compiled code is running, called by the block that is being recorded: a graph, or what is around it."""
    return any(module_and_function(frame) == COMPILED_CODE for frame in frames_of_block())


def code_of_graph() -> CodeType | None:
    """The code that Dynamo has made which runs the graph that begins now; None if Dynamo has not made the graph."""
    for frame in frames_of_block():
        if module_and_function(frame) == COMPILED_CODE:
            break
        if _runs_graphs(frame):
            return frame.f_code
    return None


def code_beside_graphs() -> CodeType | None:
    """The code that Dynamo has made which runs what Python runs now, as it would without torch.compile.

    None if that cannot be told: within a graph, and in a function that Dynamo has compiled by itself without any.
    """
    is_unknown = False  # whether a function of the user's runs that Dynamo may have compiled by itself
    for frame in frames_of_block():
        module, _ = place = module_and_function(frame)
        if place == COMPILED_CODE or module is None or module.startswith(_GRAPHS):
            return None
        if _runs_graphs(frame):
            return None if is_unknown else frame.f_code
        is_unknown = place != _DYNAMO_IS_OFF and (is_unknown or not is_library(module))
    return None


def _runs_graphs(frame: FrameType) -> bool:
    return any(name.startswith(_GRAPH) for name in frame.f_code.co_names)
