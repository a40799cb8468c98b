"""Runs a policy on the graph, step by step, and counts the bytes alive: what every planner is judged by.

In forward, an op makes its outputs. A value is alive until its last reader has run, and as long as the program keeps it
(`Value.alive_until`); an input, or a value of which neither is known, is alive to the end. From then on only what the
policy stores of it is alive. A payload is made together with its value. What is offloaded, a value or its payload, is
alive to the end, and beside the forward of the next call: it is being copied.

What a cache outside of the block holds (`Value.cached`) stays beside the forwards of the calls that follow, too, and is
gone when backward begins.

In backward, each event requests its values. A retained value is there. A compressed one is decompressed at its first
request. Any other is rebuilt by replaying its producer: this requests the producer's inputs in turn, and also makes its
other outputs that are not stored. Copies are freed at the end of the event that uses them last, except for what only
passes through a replay (`segments.py`). What is retained or compressed is held until no event is left that may need it.
Replays and codecs run before the event's own step, which then allocates. Part of that (`late_bytes`) is allocated after
the step has freed the copies of its values. Part of that again (`after_bytes`) is allocated when the step is over, and
what was retained of its values is free, too. What is offloaded comes back before the call's backward begins. Such a
payload is counted as long as one that was on the device all along, though it goes with its decompression.

If backward keeps its graph (`BlockGraph.kept`), what is retained or compressed is held until its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import OFFLOAD, RETAIN, CodecCost, Profile, is_codec, is_offloaded


@dataclass(frozen=True)
class Simulation:
    """One call of a block.

    `held`: bytes between forward and backward. `forward` and `timeline`: bytes alive at each op of forward and at each
    event of backward, with the largest workspace of the codecs and operators at work. `seconds`: what replays, codecs
    and transfers add. `fetched`: bytes that are copied to the host while forward runs the call after this one, and come
    back while backward does. `carried`: bytes of the timeline that are not there in the last block in forward order
    (`BlockGraph.carried_bytes`). `cached`: bytes that are alive beside what is held until the forward of the whole
    model has ended (`Value.cached`).
    """

    held: int
    forward: tuple[int, ...]
    timeline: tuple[int, ...]
    seconds: float
    fetched: int = 0
    carried: int = 0
    cached: int = 0

    @property
    def inner_peak(self) -> int:
        """The most bytes within the call's forward or backward."""
        return max((*self.forward, *self.timeline), default=0)

    @property
    def transient(self) -> int:
        """What forward or backward needs beyond what the call holds."""
        return max(0, self.inner_peak - self.held)

    @property
    def forward_transient(self) -> int:
        """What forward needs beyond what is there when it has ended."""
        return max(0, max(self.forward, default=0) - self.held - self.cached)


@dataclass
class _Backward:
    """The backward of one call: when each value was rebuilt and last used, and when each replay was run."""

    profile: Profile
    policy: Policy
    rebuilt: dict[int, int] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    replayed: dict[int, int] = field(default_factory=dict)

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
                producer = self.profile.graph.values[value].producer
                if producer is not None:  # else it is lent and no block needs it: `check` refuses all others
                    pending.extend(self._replay(producer, time))
            elif store not in (RETAIN, OFFLOAD):
                self.rebuilt.setdefault(value, time)

    def _replay(self, op: int, time: int) -> tuple[int, ...]:
        """Run the replay that ends with `op` unless it ran before; return the values to request for it."""
        if op in self.replayed:
            return ()
        self.replayed[op] = time
        for output in self.profile.graph.ops[op].outputs:
            if self.policy.stores[output] is None:
                self.rebuilt[output] = time
        return self.profile.graph.segments[op].inputs

    def timeline(self) -> tuple[int, ...]:
        """The bytes alive at each event."""
        events = self.profile.graph.events
        changes = [0] * (len(events) + 1)
        for first, last, nbytes in self._intervals():
            changes[first] += nbytes
            changes[last + 1] -= nbytes
        workspace = self._workspace()
        alive = zip(accumulate(changes), events, workspace, strict=False)
        carried = self.profile.graph.carried_bytes
        return tuple(total + event.gradient_bytes + extra + carried for total, event, extra in alive)

    def _intervals(self) -> Iterator[tuple[int, int, int]]:
        """First event, last event and bytes of each copy and payload."""
        end = len(self.profile.graph.events) - 1
        for value, first in self.rebuilt.items():
            if value in self.last_use:
                yield first, self.last_use[value], self.profile.graph.values[value].nbytes
        for value, store in enumerate(self.policy.stores):
            # a value that nothing uses is held to the end
            if store == OFFLOAD:
                yield 0, self.last_use.get(value, end), self.profile.graph.values[value].nbytes
            elif store is not None:
                last = self.profile.graph.kept_until[value] if value in self.last_use else end
                yield 0, last, _bytes_of(self.profile, self.policy, value)

    def _workspace(self) -> list[int]:
        """The largest workspace at each event, beside its gradients.

        A codec's counts as long as the value it decompressed is alive. `late_bytes` take the place of the copies that
        are freed before. The workspace of a replay does not count while the step allocates `made_bytes`: the replay has
        ended by then.
        """
        most = [0] * len(self.profile.graph.events)
        for value, offer in chosen_codecs(self.profile, self.policy).items():
            if value in self.rebuilt:
                for time in range(self.rebuilt[value], self.last_use[value] + 1):
                    most[time] = max(most[time], offer.workspace_bytes)
        most = [codecs - self._let_go(time) for time, codecs in enumerate(most)]
        for op, time in self.replayed.items():
            beyond = self.profile.graph.replay_bytes[op] - self.profile.graph.events[time].made_bytes
            most[time] = max(most[time], beyond)
        return most

    def _let_go(self, time: int) -> int:
        """Of an event's late bytes, those that find room where its values were: the copies at first, and then all."""
        graph, event, stores = self.profile.graph, self.profile.graph.events[time], self.policy.stores
        values = graph.let_go(time)
        copies = sum(graph.values[value].nbytes for value in values if stores[value] != RETAIN)
        payloads = sum(_bytes_of(self.profile, self.policy, value) for value in values if is_codec(stores[value]))
        whole = sum(graph.values[value].nbytes for value in values) + payloads
        return min(event.late_bytes, event.after_bytes + copies, whole)

    def seconds(self) -> float:
        replayed = sorted(part for op in self.replayed for part in self.profile.graph.segments[op].ops)
        replays = sum(self.profile.op_seconds[op] for op in replayed)
        offers = chosen_codecs(self.profile, self.policy).values()
        return replays + sum(offer.seconds for offer in offers) + self._stalls(offers)

    def _stalls(self, offers: Collection[CodecCost]) -> float:
        """The seconds of the transfers beyond the block's own compute, beside which they run."""
        forward, backward = self.profile.hiding_seconds
        out = sum(offer.out_seconds for offer in offers) - forward
        back = sum(offer.back_seconds for offer in offers) - backward
        return max(0.0, out) + max(0.0, back)


def forward_timeline(profile: Profile, policy: Policy) -> tuple[int, ...]:
    """The bytes alive at each op of forward, also of a policy that backward could not do with."""
    graph, codecs = profile.graph, chosen_codecs(profile, policy)
    end = len(graph.ops) - 1
    changes = [0] * (len(graph.ops) + 1)
    workspace = [op.workspace_bytes for op in graph.ops]
    for index, (first, last) in enumerate(graph.forward_lives):
        whole, after = graph.values[index].nbytes, _bytes_of(profile, policy, index)
        payload = after if is_codec(policy.stores[index]) else 0
        spans = [(first, last, whole + payload), (last + 1, end, after)]
        for begin, until, nbytes in spans:
            changes[begin] += nbytes
            changes[until + 1] -= nbytes
        if index in codecs:
            for op in range(first, last + 1):
                workspace[op] = max(workspace[op], codecs[index].workspace_bytes)
    changes[0] += graph.forward_overhead
    return tuple(alive + extra for alive, extra in zip(accumulate(changes), workspace, strict=False))


def _bytes_of(profile: Profile, policy: Policy, value: int) -> int:
    """What is stored of a value, while it is on the device."""
    store = policy.stores[value]
    return profile.codec(value, store).payload_bytes if is_offloaded(store) else policy.stored_bytes(profile, value)


def chosen_codecs(profile: Profile, policy: Policy) -> dict[int, CodecCost]:
    """By value, the cost of the codec chosen for it, and of its transfers if it is offloaded."""
    stores = enumerate(policy.stores)
    return {value: profile.codec(value, store) for value, store in stores if store not in (None, RETAIN)}


def simulate(profile: Profile, policy: Policy) -> Simulation:
    """Run one call; ValueError if the policy cannot be carried out."""
    policy.check(profile)
    backward = _Backward(profile, policy)
    backward.run()
    fetched = sum(offer.moved_bytes for offer in chosen_codecs(profile, policy).values())
    return Simulation(
        policy.held_bytes(profile),
        forward_timeline(profile, policy),
        backward.timeline(),
        backward.seconds(),
        fetched,
        profile.graph.carried_bytes,
        policy.cached_bytes(profile),
    )
