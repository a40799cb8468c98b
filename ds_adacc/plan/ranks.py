"""Communication among the ranks at step boundaries, so that all ranks run the same policies."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=30)  # gloo's default, and more than it takes to start all these searches
# A live set that no plan fits takes longest. Each search lasts up to twice its time. So with max_seconds as the unit,
# two attempts at a plan take 8, the smallest peak 2, and ten searches for a looser bound 5. No step plans for more than
# 20 such live sets.
_SEARCHES = 20 * 15


def has_other_ranks() -> bool:
    """Whether the program runs on several ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


class Ranks:
    """The ranks of a group, or the listed ranks. They communicate over gloo, which never waits for the accelerator.

    Without a group, this process is the only rank. `max_seconds` is `adacc.solver.max_seconds`: while the first rank
    plans, the others wait for it, and gloo must not take the first one for lost.

    The gloo group lasts as long as the process. Each rank's collector frees an engine at another moment, and torch
    names a new group after the number of those that exist. So a rank that had destroyed its group would wait for a name
    that the others do not use.
    """

    def __init__(self, group: dist.ProcessGroup | Sequence[int] | None = None, max_seconds: float = 0.0) -> None:
        self._group: dist.ProcessGroup | None = None
        listed = group is None or isinstance(group, Sequence)
        members = list(group or ()) if listed else dist.get_process_group_ranks(group)
        if len(members) > 1:
            timeout = _TIMEOUT + timedelta(seconds=_SEARCHES * max_seconds)
            made = dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=True)
            assert not isinstance(made, int)  # as for a rank that is none of the members
            self._group = made

    @property
    def size(self) -> int:
        return 1 if self._group is None else dist.get_world_size(self._group)

    @property
    def is_first(self) -> bool:
        return self._group is None or dist.get_rank(self._group) == 0

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank. Every rank must call."""
        return self.vote(flag)()

    def vote(self, flag: bool) -> Callable[[], bool]:
        """Begin what `any` does, without waiting for the other ranks. Every rank must call.

        The function that it returns waits for the result. Called a step later, it finds the result there as a rule.
        """
        if self._group is None:
            return lambda: flag
        votes = torch.tensor([int(flag)], device="cpu")
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def result() -> bool:
            work.wait()
            return bool(votes.item())

        return result

    def gather(self, thing: Any) -> list[Any]:
        """The `thing` of every rank, in the order of the ranks. Every rank must call."""
        if self._group is None:
            return [thing]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, thing, group=self._group)
        return everyone

    def from_first(self, thing: Any) -> Any:
        """The `thing` of the first rank. Every rank must call."""
        if self._group is None:
            return thing
        box = [thing]
        first = dist.get_process_group_ranks(self._group)[0]
        dist.broadcast_object_list(box, src=first, group=self._group)
        return box[0]

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the first rank, and return its result on every rank. Every rank must call.

        If `work` raises an exception, every rank raises it.
        """
        result, error = None, None
        if self.is_first:
            try:
                result = work()
            except Exception as raised:
                error = raised
        result, received = self.from_first((result, _portable(error)))
        try:
            if received is not None:
                raise error or received
            return result
        finally:
            # The traceback has this frame, which would have the error. Whoever catches it would keep all frames alive,
            # and with the script's its model, until Python collects garbage.
            del error, received


class Ballot:
    """A question put to all ranks at the end of every step: whether a flag is true on any of them.

    After a *quiet* step, in which nothing was due on any rank, no rank waits for another one. The ranks only begin to
    ask each other, and the answer comes at the end of the next step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._begun: Callable[[], bool] | None = None

    def ask(self, flag: bool, is_quiet: bool) -> bool:
        """Whether the flag is true on any rank, or was after the last quiet step.

        Every rank must call, with the same `is_quiet`.
        """
        begun, self._begun = self._begun, None
        if self._ranks.size == 1:
            return flag
        passed = begun is not None and begun()
        if not is_quiet:
            return self._ranks.any(flag)
        if not passed:
            self._begun = self._ranks.vote(flag)
        return passed


def _portable(error: Exception | None) -> Exception | None:
    """The exception, or a RuntimeError with its text if the exception cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"on the first rank: {type(error).__name__}: {error}")
