"""What may be chosen for one kind of block, and what must then run: the first half of the MILP.

The choices are binaries: how each value is stored. All else follows from them. "Op o has run by event t" is held from
below by the requests for its outputs (the paper's dependency constraints, section 3.3, one per event), and from above
by their sum, so that no op runs early, or for nothing. Where `Schedule` settles a question, there is no variable.
"""

from __future__ import annotations

from itertools import pairwise

import mip
from ds_adacc.planner.policy import Policy
from ds_adacc.planner.profile import RETAIN, CodecCost, Profile
from ds_adacc.planner.schedule import Schedule

Expr = mip.LinExpr | mip.Var | float


class BlockProgram:
    """Choices and replays of one kind of block, added to `model` with their constraints."""

    def __init__(self, model: mip.Model, profile: Profile) -> None:
        self.model = model
        self.profile = profile
        self.schedule = Schedule.of(profile.graph)
        self.choices: dict[tuple[int, str], mip.Var] = {}
        self._ran: dict[tuple[int, int], mip.Var] = {}
        self._add_choices()
        self._add_replays()
        for op, times in self.schedule.times.items():
            for time in times:
                self._run_on_request(op, time)
        self._store_the_rest()

    def retained(self, value: int) -> Expr:
        """Whether a value is kept as it is."""
        return self.choices.get((value, RETAIN), 0)

    def compressed(self, value: int) -> mip.LinExpr:
        """Whether a value is kept in compressed form."""
        return mip.xsum(var for _, var in self.compressions(value))

    def stored(self, value: int) -> mip.LinExpr:
        """Whether a value is kept in any form."""
        return self.retained(value) + self.compressed(value)

    def compressions(self, value: int) -> list[tuple[CodecCost, mip.Var]]:
        """Per codec on offer for a value, its cost and whether it is chosen."""
        offers = self.profile.codecs[value]
        return [(offer, self.choices[value, offer.codec]) for offer in offers if (value, offer.codec) in self.choices]

    def ran_by(self, op: int, time: int) -> Expr:
        """Whether an op has been replayed by the end of an event."""
        latest = self.schedule.latest_run(op, time)
        return 0 if latest is None else self._ran[op, latest]

    def runs(self, op: int) -> mip.Var:
        """Whether an op is replayed at all."""
        return self._ran[op, self.schedule.times[op][-1]]

    def policy(self) -> Policy:
        """The policy of the solution that the model holds."""
        stores: list[str | None] = [None] * len(self.profile.graph.values)
        for (value, store), var in self.choices.items():
            if var.x > 0.5:
                stores[value] = store
        return Policy(tuple(stores), tuple(sorted(op for op in self.schedule.times if self.runs(op).x > 0.5)))

    def _add_choices(self) -> None:
        for index, value in enumerate(self.profile.graph.values):
            if value.storable and self.schedule.used(index):
                for store in (RETAIN, *(offer.codec for offer in self.profile.codecs[index])):
                    self.choices[index, store] = self.model.add_var(var_type=mip.BINARY)
                self.model += self.stored(index) <= 1

    def _add_replays(self) -> None:
        for op, times in self.schedule.times.items():
            for time in times:
                self._ran[op, time] = self.model.add_var(var_type=mip.BINARY)
            for before, after in pairwise(times):
                self.model += self._ran[op, before] <= self._ran[op, after]

    def _run_on_request(self, op: int, time: int) -> None:
        """An op has run by an event if and only if an output that is not stored was requested by then."""
        ran = self._ran[op, time]
        served = []
        for value in self.profile.graph.ops[op].outputs:
            requests: list[Expr] = [self.ran_by(p, time) for p in self.schedule.early_readers(value, time)]
            if value in self.schedule.first and self.schedule.first[value] <= time:
                requests = [1]
            for request in requests:
                self.model += ran >= request - self.stored(value)
            if requests:
                serves = self.model.add_var(var_type=mip.BINARY)
                self.model += serves <= 1 - self.stored(value)
                self.model += serves <= mip.xsum(requests)
                served.append(serves)
        self.model += ran <= mip.xsum(served)

    def _store_the_rest(self) -> None:
        """Store what is used but cannot be rebuilt (equation 6 is a case of it), and nothing that is not used."""
        for index, value in enumerate(self.profile.graph.values):
            readers = [self.runs(op) for op in self.schedule.readers[index]]
            rebuildable = value.producer in self.schedule.times
            if index in self.schedule.first and not rebuildable:
                self.model += self.stored(index) == 1
            for reader in [] if rebuildable else readers:
                self.model += self.stored(index) >= reader
            if index not in self.schedule.first and readers and value.storable:
                self.model += self.stored(index) <= mip.xsum(readers)
