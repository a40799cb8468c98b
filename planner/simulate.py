"""Carry a policy out on paper, event by event, and watch the bytes: the judge of every planner.

Forward holds the stored values of every call of every kind. Backward then takes the calls one by one. Within a
call, an event asks for its values: a retained one is there; a compressed one is decompressed at its first request;
any other is rebuilt by replaying its producer, whose inputs are requested in turn and whose other missing outputs
come alive with it. Stored payloads and rebuilt copies alike go at the end of the event that uses them last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import RETAIN, CodecCost, Kind, Profile
from ds_adacc.planner.together import Together, groups_of


@dataclass(frozen=True)
class Simulation:
    """One call of a block.

    `held` bytes from forward to backward; `inner_peak`, the most bytes within its backward, codec workspace included;
    `timeline`, the bytes at each event, without workspace; `seconds` that its replays and codecs add.
    """

    held: int
    inner_peak: int
    timeline: tuple[int, ...]
    seconds: float


@dataclass
class _Backward:
    """The backward of one call: when each value was rebuilt and last used, and which ops were replayed."""

    profile: Profile
    policy: Policy
    rebuilt: dict[int, int] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    replayed: set[int] = field(default_factory=set)

    def run(self) -> None:
        for time, event in enumerate(self.profile.graph.events):
            for value in event.values:
                self._request(value, time)

    def _request(self, value: int, time: int) -> None:
        pending = [value]
        while pending:
            value = pending.pop()
            self.last_use[value] = time
            store = self.policy.stores[value]
            if store is None:
                pending.extend(self._replay(self.profile.graph.values[value].producer, time))
            elif store != RETAIN:
                self.rebuilt.setdefault(value, time)

    def _replay(self, op: int, time: int) -> tuple[int, ...]:
        """Run `op` unless it ran before; return the values to request for it."""
        if op in self.replayed:
            return ()
        self.replayed.add(op)
        for output in self.profile.graph.ops[op].outputs:
            if self.policy.stores[output] is None:
                self.rebuilt[output] = time
        return self.profile.graph.ops[op].inputs

    def bytes_alive(self, time: int) -> int:
        total = self.profile.graph.events[time].gradient_bytes
        for value, start in self.rebuilt.items():
            if start <= time <= self.last_use.get(value, -1):
                total += self.profile.graph.values[value].nbytes
        for value in range(len(self.policy.stores)):
            # what nothing uses is held to the end
            if time <= self.last_use.get(value, time):
                total += self.policy.stored_bytes(self.profile, value)
        return total

    def seconds(self) -> float:
        replays = sum(self.profile.op_seconds[op] for op in sorted(self.replayed))
        return replays + sum(offer.seconds for offer in chosen_codecs(self.profile, self.policy).values())


def chosen_codecs(profile: Profile, policy: Policy) -> dict[int, CodecCost]:
    """The cost of the codec chosen for each compressed value, by value."""
    stores = enumerate(policy.stores)
    return {value: profile.codec(value, store) for value, store in stores if store not in (None, RETAIN)}


def simulate(profile: Profile, policy: Policy) -> Simulation:
    """Run one call's backward; ValueError if the policy cannot be carried out.

    An op that the policy replays but nothing asks for never runs, and costs nothing.
    """
    policy.check(profile)
    backward = _Backward(profile, policy)
    backward.run()
    timeline = tuple(backward.bytes_alive(time) for time in range(len(profile.graph.events)))
    workspace = max((offer.workspace_bytes for offer in chosen_codecs(profile, policy).values()), default=0)
    inner_peak = max((alive + workspace for alive in timeline), default=0)
    return Simulation(policy.held_bytes(profile), inner_peak, timeline, backward.seconds())


def peak_bytes(kinds: Sequence[Kind], policies: Sequence[Policy], together: Together = None) -> int:
    """The most bytes of activations: what all calls hold, plus what one call's backward takes beyond its share.

    The paper's M_act (equation 8), with the transient that it leaves out; of the kinds alive together, whichever
    take the most. ValueError if a policy does not fit.
    """
    runs = [(kind.count, simulate(kind.profile, policy)) for kind, policy in zip(kinds, policies, strict=True)]
    return max(_peak([runs[place] for place in group]) for group in groups_of(kinds, together))


def _peak(runs: Sequence[tuple[int, Simulation]]) -> int:
    """The same of calls that are all alive together, so many of each."""
    transient = max(run.inner_peak - run.held for _, run in runs)
    return sum(count * run.held for count, run in runs) + max(0, transient)


def added_seconds(kinds: Sequence[Kind], policies: Sequence[Policy]) -> float:
    """Seconds that replays and codecs add to a step (paper, equation 4). ValueError if a policy does not fit."""
    pairs = zip(kinds, policies, strict=True)
    return sum(kind.count * simulate(kind.profile, policy).seconds for kind, policy in pairs)
