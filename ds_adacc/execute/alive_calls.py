"""How many calls of each block type autograd holds at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any


class Forward:
    """Stands for the calls of one forward: it is gone when autograd holds none of them any more.

    `on_backward` is called when the backward of a call has begun.
    """

    __slots__ = ("__weakref__", "on_backward")

    def __init__(self, on_backward: Callable[[], None]) -> None:
        self.on_backward = on_backward


class AliveCall:
    """One call. Autograd holds it: by the slot of the first saved tensor that is not discarded.

    In an observed step all slots of the call hold it; without hooks, the nodes of its output do.
    """

    __slots__ = ("_alive", "_digest", "_forward")

    def __init__(self, forward: Forward, alive: Counter[str], digest: str) -> None:
        """`alive`: how many calls of each block type are alive, this one among them."""
        self._forward = forward
        self._alive: Counter[str] | None = alive
        self._digest = digest

    def note_backward(self) -> None:
        """Told by a slot: the call's backward has begun."""
        self._forward.on_backward()

    def end(self, *_: Any) -> None:
        """A hook of a node, which runs before the node's backward. The node itself lives as long as the loss does.

        So a call counts no longer from then on, though a backward with `retain_graph` keeps what it holds.
        """
        self.note_backward()
        self._uncount()

    def __del__(self) -> None:
        self._uncount()

    def _uncount(self) -> None:
        if self._alive is not None:
            self._alive[self._digest] -= 1
            self._alive = None


class AliveCalls:
    """Counts the calls that are alive, by block type."""

    def __init__(self) -> None:
        self._alive: Counter[str] = Counter()
        self._most: Counter[str] = Counter()  # of them at once, since the pass before has ended

    def begin(self, digest: str, forward: Forward) -> AliveCall:
        """A call of this block type, which counts as long as the result is held."""
        self._alive[digest] += 1
        self._most[digest] = max(self._most[digest], self._alive[digest])
        return AliveCall(forward, self._alive, digest)

    def end_pass(self) -> Counter[str]:
        """The most calls of each block type that were alive at once since the pass before has ended."""
        most, self._most = self._most, +self._alive
        return most
