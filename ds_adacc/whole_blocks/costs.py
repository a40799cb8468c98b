"""The costs of a block that is recomputed as a whole, from the operators that it was recorded with (Rule R20)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ds_adacc import planner
from ds_adacc.profile.block_graph import block_graph, whole_graph
from ds_adacc.program.recording import Recording

_WORTH = 8  # it is recomputed as a whole if replays of its operators leave more than an eighth of what it saves


@dataclass(frozen=True)
class WholeCosts:
    """What a block takes by its operators, with everything retained, and with every replay that there is.

    `saved_bytes`: of what it makes and backward needs; `kept_bytes`: as much of that as no replay can rebuild.
    `forward` and `backward`: the most bytes within each beyond what is held between them. `arriving`: the gradients
    with which backward begins.
    """

    saved_bytes: int
    kept_bytes: int
    forward: int
    backward: int
    arriving: int

    @classmethod
    def of(cls, recording: Recording) -> WholeCosts:
        """The costs of the block, recorded operator by operator."""
        graph = block_graph(recording)
        nothing = (0.0,) * len(graph.ops)
        profile = planner.Profile(graph, nothing, ((),) * len(graph.values))
        retained = planner.simulate(profile, planner.retain_policy(profile))
        least = planner.recompute_policy(profile)
        return cls(
            _made_bytes(graph, recording.saved),
            _made_bytes(graph, [index for index, store in enumerate(least.stores) if store is not None]),
            max(max(retained.forward, default=0) - retained.held, 0),
            max(max(retained.timeline, default=0) - retained.held, 0),
            recording.backward.bytes_of_outputs,
        )

    @property
    def are_worth_it(self) -> bool:
        """Whether a second forward saves much that replays of operators do not."""
        return self.kept_bytes * _WORTH > self.saved_bytes


def whole_profile(recording: Recording, costs: WholeCosts) -> planner.Profile:
    """The profile of the block as one operator. Nothing has timed its second forward yet: it counts as 0 seconds."""
    graph = whole_graph(recording, costs.saved_bytes)
    made = max(costs.backward - costs.arriving, 0)
    ops = [replace(op, workspace_bytes=costs.forward) for op in graph.ops]
    events = [replace(event, gradient_bytes=costs.backward, made_bytes=made) for event in graph.events]
    return planner.Profile(replace(graph, ops=tuple(ops), events=tuple(events)), (0.0,), ((),) * len(graph.values))


def _made_bytes(graph: planner.BlockGraph, indices: Iterable[int]) -> int:
    return sum(graph.values[index].nbytes for index in indices if graph.values[index].producer is not None)
