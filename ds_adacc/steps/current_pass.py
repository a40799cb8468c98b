"""The pass that runs now, a forward and its backward: what it has called, and whether autograd holds anything of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_adacc.execute.alive_calls import AliveCall, AliveCalls, Forward
from ds_adacc.execute.block import Block
from ds_adacc.execute.variant import Trial
from ds_adacc.plan.block_type import KnownType
from ds_adacc.profile.arrival import Entrance
from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.signature import is_in_backward
from ds_adacc.steps.given_inputs import GivenInputs


@dataclass(frozen=True)
class CalledBlocks:
    """The blocks of a type that a pass has called, and the most calls of them that were alive at once."""

    blocks: Collection[Block]
    alive: int


CalledByType = Mapping[str, CalledBlocks]  # by block type


class CurrentPass:
    """A forward and its backward. When both are over, the next `CurrentPass` of the step replaces it.

    `has_begun`: it has called a block. `called`: the blocks that it has called, by block type.
    `given`: the inputs that its calls hold.
    `probed`: the block types whose codecs a call of it measures. `entrances`: where backward enters these calls.
    `trials`: the trials of policies that its calls have begun.
    `has_backward`: the backward of a call has begun. `keeps_graph`: that is one with `retain_graph`, which frees
    nothing while it runs.
    `end_is_pending`: the engine has told of its end within the backward. It ends before the next forward.
    `casts`: the block type of the call recorded last, and of each cast that autocast kept then a function that returns
    None once it does no more.
    `alive_calls`: all that are alive; they may be of earlier passes.
    """

    def __init__(self, alive_calls: AliveCalls) -> None:
        self.has_begun = False
        self.called: dict[str, set[Block]] = {}
        self.given = GivenInputs()
        self.probed: set[str] = set()
        self.trials: list[Trial] = []
        self.entrances: set[Entrance] = set()
        self.has_backward = False
        self.keeps_graph = False
        self.end_is_pending = False
        self.casts: tuple[KnownType, Sequence[Callable[[], object]]] | None = None
        self._alive_calls = alive_calls
        self._forward: weakref.ref[Forward] | None = None
        self._holds_unknown = False

    def note_call(self, digest: str, block: Block) -> None:
        """Note a call of a block of this type."""
        self.has_begun = True
        self.called.setdefault(digest, set()).add(block)

    def take_back(self, digest: str, block: Block) -> None:
        """The call was counted under this block type, but the block has run another program.

        That one is recorded at the next call. Were this one to stay, both would count as alive together.
        """
        blocks = self.called.get(digest, set())
        blocks.discard(block)
        if not blocks:
            self.called.pop(digest, None)

    def see_casts(self) -> None:
        """Another call is about to be recorded: see whether autocast still keeps the casts of the one before."""
        if self.casts is not None and self.casts[1]:
            known, casts = self.casts
            known.note_casts(any(cast() is not None for cast in casts))
        self.casts = None

    def begin_call(self, digest: str) -> AliveCall:
        """A call of this block type begins."""
        forward = None if self._forward is None else self._forward()
        if forward is None:
            forward = Forward(self._note_backward)
            self._forward = weakref.ref(forward)
        return self._alive_calls.begin(digest, forward)

    def note_plain(self, call: AliveCall, output: Any) -> None:
        """Note a call without hooks. The graphs that lead to its output hold it in place of a slot.

        If the output has no graph, nothing shows when autograd frees what the call has saved.
        """
        nodes = {node for tensor in tensors_in(output) if (node := tensor.grad_fn) is not None}
        if not nodes:
            self._holds_unknown = True
        for node in nodes:
            node.register_prehook(call.end)

    def end(self) -> CalledByType:
        """The pass has ended. Returns what it has called, by block type."""
        most = self._alive_calls.end_pass()
        return {digest: CalledBlocks(blocks, most[digest]) for digest, blocks in self.called.items()}

    @property
    def is_held(self) -> bool:
        """Whether autograd holds anything of its calls, as far as slots and graphs tell."""
        return self._holds_unknown or (self._forward is not None and self._forward() is not None)

    def _note_backward(self) -> None:
        self.has_backward = True
        # What reads the graph outside of a backward, or a probe with backwards of its own, tells nothing of training's.
        if is_in_backward() and not any(entrance.is_probing for entrance in self.entrances):
            self.keeps_graph |= torch._C._autograd._get_current_graph_task_keep_graph()
