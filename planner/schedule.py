"""What holds for a block's backward whatever the policy, so that the MILP needs no variable for it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ds_adacc.planner.graph import BlockGraph


@dataclass(frozen=True)
class Schedule:
    """When values are used and when ops may be replayed.

    `first` and `last`: the first and the last event that lists a value (only of values that some event lists). `times`:
    per replay that may be run, named by the op at its end, the events at which it may be, sorted. `readers`: per value,
    the replays in `times` that read it.
    """

    first: dict[int, int]
    last: dict[int, int]
    readers: tuple[tuple[int, ...], ...]
    times: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, graph: BlockGraph) -> Schedule:
        """Follow the requests from events to the ops that can make the values, and on to what those ops read."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for time, event in enumerate(graph.events):
            for value in event.values:
                first.setdefault(value, time)
                last[value] = time
        readers: list[list[int]] = [[] for _ in graph.values]
        times: dict[int, tuple[int, ...]] = {}
        for op in reversed(graph.segments):
            possible: set[int] = set()
            for value in graph.ops[op].outputs:
                requests = {time for reader in readers[value] for time in times[reader]}
                if value in first:
                    requests = {time for time in requests if time < first[value]} | {first[value]}
                possible |= requests
            if possible:
                times[op] = tuple(sorted(possible))
                for value in graph.segments[op].inputs:
                    readers[value].append(op)
        return cls(first, last, tuple(map(tuple, readers)), times)

    def used(self, value: int) -> bool:
        """Whether anything in backward may request the value."""
        return value in self.first or bool(self.readers[value])

    def latest_run(self, op: int, time: int) -> int | None:
        """The last event up to `time` at which `op` may run, None if there is none."""
        index = bisect_right(self.times[op], time)
        return self.times[op][index - 1] if index else None

    def late_readers(self, value: int, time: int) -> list[int]:
        """The readers of a value that may run at event `time` or later."""
        return [op for op in self.readers[value] if self.times[op][-1] >= time]

    def early_readers(self, value: int, time: int) -> list[int]:
        """The readers of a value that may run at event `time` or earlier."""
        return [op for op in self.readers[value] if self.times[op][0] <= time]
