"""What may be chosen for one block type, and which ops must then be replayed: the first half of the MILP.

The choices are binary variables: how each value is stored. All else follows from them. The variable "op o has run by
event t" is bounded from below by the requests for the op's outputs (the paper's dependency constraints, section 3.3),
and from above by their sum, so that no op runs early or for nothing. Each op has this variable for the last event, and
for an earlier event only if `ran_by_all` was called for it. What `Schedule` decides needs no variable.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mip

from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import OFFLOAD, RETAIN, CodecCost, Profile, is_offloaded
from ds_adacc.planner.schedule import Schedule

Expr = mip.LinExpr | mip.Var | float

_QUANTUM_SECONDS = 1e-7  # of time in the objective


class BlockVariables:
    """Choices and replays of one block type, added to `model` with their constraints.

    `max_gradient_error` bounds the policy's `gradient_error`; None: nothing does.
    """

    def __init__(self, model: mip.Model, profile: Profile, max_gradient_error: float | None) -> None:
        self.model = model
        self.profile = profile
        self.schedule = Schedule.of(profile.graph)
        self.choices: dict[tuple[int, str], mip.Var] = {}
        self._ran: dict[tuple[int, int], mip.Var] = {}
        self._add_choices(max_gradient_error)
        for op in sorted(self.schedule.times, reverse=True):
            self._run_on_request(op, self.schedule.times[op][-1])
        self._store_the_rest()
        if max_gradient_error is not None:
            self._bound_gradient_error(max_gradient_error)

    def retained(self, value: int) -> Expr:
        """Whether a value is kept as it is."""
        return self.choices.get((value, RETAIN), 0)

    def uncompressed(self, value: int) -> mip.LinExpr:
        """Whether backward finds a value without decompression or replay."""
        return self.retained(value) + mip.xsum([self.choices.get((value, OFFLOAD), 0)])

    def compressed(self, value: int) -> mip.LinExpr:
        """Whether a value is kept in compressed form."""
        return mip.xsum(var for _, var in self.compressions(value))

    def stored(self, value: int) -> mip.LinExpr:
        """Whether a value is kept in any form."""
        return self.uncompressed(value) + self.compressed(value)

    def host_bytes(self) -> mip.LinExpr:
        """Bytes of one call in host memory."""
        return mip.xsum(offer.moved_bytes * chosen for _, offer, chosen in self._all() if offer.moved_bytes)

    def compressions(self, value: int) -> list[tuple[CodecCost, mip.Var]]:
        """Per codec on offer for a value, its cost and whether it is chosen; its payload may be offloaded."""
        return [(offer, chosen) for offer, chosen in self._offers(value) if offer.codec != OFFLOAD]

    def ran_by(self, op: int, time: int) -> Expr:
        """Whether an op has been replayed by the end of an event for which `ran_by_all` was called."""
        latest = self.schedule.latest_run(op, time)
        return 0 if latest is None else self._ran[op, latest]

    def ran_by_all(self, time: int) -> None:
        """Add what `ran_by` needs to answer for this event."""
        for op in sorted(self.schedule.times, reverse=True):  # readers before what they read
            latest = self.schedule.latest_run(op, time)
            if latest is not None and (op, latest) not in self._ran:
                self._run_on_request(op, latest)
                self.model += self._ran[op, latest] <= self.runs(op)

    def runs(self, op: int) -> mip.Var:
        """Whether an op is replayed at all."""
        return self._ran[op, self.schedule.times[op][-1]]

    def policy(self) -> Policy:
        """The policy of the model's present solution."""
        stores: list[str | None] = [None] * len(self.profile.graph.values)
        for (value, store), var in self.choices.items():
            if var.x > 0.5:
                stores[value] = store
        return Policy(tuple(stores))

    def quanta(self) -> mip.LinExpr:
        """What one call adds to the step, in quanta of 0.1 microseconds (paper, equation 4)."""
        replays = (self._replay_quanta(op) * self.runs(op) for op in self.schedule.times)
        codecs = (in_quanta(offer.seconds) * chosen for _, offer, chosen in self._all())
        return mip.xsum(itertools.chain(replays, codecs, self._stalls()))

    def _replay_quanta(self, op: int) -> int:
        return sum(in_quanta(self.profile.op_seconds[part]) for part in self.profile.graph.segments[op].ops)

    def error(self) -> mip.LinExpr:
        """Relative error times bytes, summed over the values that one call compresses."""
        values = self.profile.graph.values
        return mip.xsum(offer.error * values[value].nbytes * chosen for value, offer, chosen in self._all())

    def _offers(self, value: int) -> list[tuple[CodecCost, mip.Var]]:
        offers = self.profile.offers[value]
        return [(offer, self.choices[value, offer.codec]) for offer in offers if (value, offer.codec) in self.choices]

    def _all(self) -> Iterator[tuple[int, CodecCost, mip.Var]]:
        for value in range(len(self.profile.graph.values)):
            for offer, chosen in self._offers(value):
                yield value, offer, chosen

    def _stalls(self) -> list[mip.Var]:
        """Quanta of the transfers out, and back, beyond the block's own compute, beside which they run."""
        offloaded = [(offer, chosen) for _, offer, chosen in self._all() if is_offloaded(offer.codec)]
        stalls = []
        for field, hidden in zip(("out_seconds", "back_seconds"), self.profile.hiding_seconds, strict=True):
            if offloaded:
                stalls.append(self.model.add_var())
                transfers = mip.xsum(in_quanta(getattr(offer, field)) * chosen for offer, chosen in offloaded)
                self.model += stalls[-1] >= transfers - in_quanta(hidden)
        return stalls

    def _add_choices(self, max_gradient_error: float | None) -> None:
        for index, value in enumerate(self.profile.graph.values):
            if value.storable and self.schedule.used(index):
                offers = self.profile.offers_within(index, max_gradient_error)
                for store in (RETAIN, *(offer.codec for offer in offers)):
                    self.choices[index, store] = self.model.add_var(var_type=mip.BINARY)
                self.model += self.stored(index) <= 1

    def _bound_gradient_error(self, bound: float) -> None:
        squares = [((offer.gradient_error / bound) ** 2, var) for _, offer, var in self._all() if offer.gradient_error]
        altered: dict[int, Expr] = {}
        for op, (inputs, outputs) in self.profile.graph.read_together.items():
            error = self.profile.stale_errors[op] if self.profile.stale_errors else 0.0
            if not error:
                continue
            stale = self.model.add_var(ub=1)
            for value, output in itertools.product(inputs, outputs):
                self.model += stale >= self._altered(value, altered) + self.stored(output) - 1
            # An op too fragile to be stale at all is kept from it by a bound, which the solver uses better than a row
            # with a huge factor.
            if error > bound:
                stale.ub = 0
            else:
                squares.append(((error / bound) ** 2, stale))
        if squares:
            self.model += mip.xsum(square * chosen for square, chosen in squares) <= 1

    def _altered(self, value: int, known: dict[int, Expr]) -> Expr:
        """Whether backward finds a value changed: it is compressed by a lossy codec, or rebuilt from such a value."""
        if value not in known:
            altered = known[value] = self.model.add_var(ub=1)
            self.model += altered >= mip.xsum(chosen for offer, chosen in self._offers(value) if not offer.lossless)
            producer = self.profile.graph.values[value].producer
            if producer in self.schedule.times:
                for source in self.profile.graph.segments[producer].inputs:
                    self.model += altered >= self._altered(source, known) - self.stored(value)
        return known[value]

    def _run_on_request(self, op: int, time: int) -> None:
        """An op has run by an event if and only if an output that is not stored was requested by then."""
        ran = self._ran[op, time] = self.model.add_var(var_type=mip.BINARY)
        requests = {value: self._requests(value, time) for value in self.profile.graph.ops[op].outputs}
        asked = {value: by for value, by in requests.items() if by}
        for value, by in asked.items():
            for request in by:
                self.model += ran >= request - self.stored(value)
        served = [self._serves(value, by, ran, alone=len(asked) == 1) for value, by in asked.items()]
        self.model += ran <= mip.xsum(served)

    def _requests(self, value: int, time: int) -> list[Expr]:
        """What may have requested a value by the end of an event; the constant 1 if an event always has."""
        if value in self.schedule.first and self.schedule.first[value] <= time:
            return [1]
        return [self.ran_by(op, time) for op in self.schedule.early_readers(value, time)]

    def _serves(self, value: int, requests: list[Expr], ran: mip.Var, alone: bool) -> mip.Var:
        """Whether the op runs for this output; if no other is requested, that is whether it runs at all."""
        serves = ran if alone else self.model.add_var(var_type=mip.BINARY)
        self.model += serves <= 1 - self.stored(value)
        self.model += serves <= mip.xsum(requests)
        return serves

    def _store_the_rest(self) -> None:
        """Store what is used but cannot be rebuilt (equation 6 is such a case), and nothing that is not used."""
        for index, value in enumerate(self.profile.graph.values):
            readers = [self.runs(op) for op in self.schedule.readers[index]]
            rebuildable = value.producer in self.schedule.times
            if index in self.schedule.first and not rebuildable:
                self.model += self.stored(index) == 1
            for reader in [] if rebuildable else readers:
                self.model += self.stored(index) >= reader
            if index not in self.schedule.first and readers and value.storable:
                self.model += self.stored(index) <= mip.xsum(readers)


def in_quanta(seconds: float) -> int:
    """Whole numbers keep the sums of the objective exact: CBC works with tolerances."""
    return round(seconds / _QUANTUM_SECONDS)
