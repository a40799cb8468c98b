"""The bytes of one block type in the MILP: what is held, and what is alive at each event of its backward.

A value has a full-size copy (retained, fetched, decompressed or rebuilt) and, if compressed, a payload. A copy is freed
after its last use; a payload, and what is retained, when no event is left that may need it. From the first event that
lists a value, its copy is alive whatever the policy. Before that event it is alive only if something else needed it. So
memory rarely depends on a product of choices. Where it does, the product is a variable that is bounded from below only:
the objective never gains from more memory. What only passes through a replay is part of the workspace of that replay.
"""

from __future__ import annotations

import mip

from ds_adacc.planner.milp_choices import BlockVariables, Expr


class BlockMemory:
    """Memory of one block as expressions, in the profile's unit of bytes."""

    def __init__(self, variables: BlockVariables) -> None:
        self._variables = variables
        self._schedule = variables.schedule
        self._graph = variables.profile.graph
        self._anys: dict[frozenset, mip.Var] = {}
        self._used = [value for value in range(len(self._graph.values)) if self._schedule.used(value)]

    def held(self) -> mip.LinExpr:
        """Bytes that one call holds between forward and backward (paper, equation 8)."""
        parts: list[Expr] = []
        for index, value in enumerate(self._graph.values):
            parts.append(value.nbytes * self._variables.retained(index))
            parts.extend(offer.nbytes * var for offer, var in self._variables.compressions(index))
        return mip.xsum(parts)

    def cached(self) -> mip.LinExpr:
        """Bytes that are alive beside those held until the forward of the whole model has ended (`Value.cached`)."""
        return mip.xsum(
            value.nbytes * (1 - self._variables.retained(index))
            for index, value in enumerate(self._graph.values)
            if value.cached
        )

    def in_forward(self, number: int) -> mip.LinExpr:
        """Bytes alive when an op runs in forward, with the largest workspace of the codecs and the op at work."""
        parts: list[Expr] = [self._graph.forward_overhead]
        needs: list[Expr] = [self._graph.ops[number].workspace_bytes]
        for index, (first, last) in enumerate(self._graph.forward_lives):
            if first <= number:
                full = self._graph.values[index].nbytes
                parts.append(full if number <= last else full * self._variables.uncompressed(index))
                parts += [offer.payload_bytes * chosen for offer, chosen in self._variables.compressions(index)]
            if first <= number <= last:
                needs += [offer.workspace_bytes * chosen for offer, chosen in self._variables.compressions(index)]
        return mip.xsum(parts) + self._most(needs)

    def at(self, time: int) -> mip.LinExpr:
        """Bytes alive at an event of backward, with the largest workspace of the codecs and operators at work."""
        for earlier in (time - 1, time):
            self._variables.ran_by_all(earlier)
        alive = mip.xsum(self._alive(value, time) for value in self._used)
        return alive + self._workspace(time) + self._graph.events[time].gradient_bytes + self._graph.carried_bytes

    def _workspace(self, time: int) -> Expr:
        codecs = [
            offer.workspace_bytes * (chosen + self._copy(value, time) - 1)
            for value in self._used
            for offer, chosen in self._variables.compressions(value)
            if offer.workspace_bytes
        ]
        late, after = self._graph.events[time].late_bytes, self._graph.events[time].after_bytes
        needs: list[Expr] = [need - late for need in (0, *codecs)]
        if late:
            needs += [need - after - self._let_go(time) for need in (0, *codecs)]
        if after:
            needs += [need - self._let_go_after(time) for need in (0, *codecs)]
        for op, times in self._schedule.times.items():
            above = self._graph.replay_bytes[op] - self._graph.events[time].made_bytes + late
            if above > 0 and time in times:
                now = self._variables.ran_by(op, time) - self._variables.ran_by(op, time - 1)
                needs.append(above * now - late)
        return self._most(needs)

    def _let_go(self, time: int) -> mip.LinExpr:
        """Bytes of the copies that are gone when an event's step has run."""
        return mip.xsum(
            self._graph.values[value].nbytes * (1 - self._variables.retained(value))
            for value in self._graph.let_go(time)
        )

    def _let_go_after(self, time: int) -> Expr:
        """Bytes of the copies and payloads that are gone when an event is over, with what was retained."""
        values = self._graph.let_go(time)
        offers = [each for value in values for each in self._variables.compressions(value)]
        whole = sum(self._graph.values[value].nbytes for value in values)
        return mip.xsum([whole, *(offer.payload_bytes * chosen for offer, chosen in offers)]) if offers else whole

    def _most(self, needs: list[Expr]) -> Expr:
        """The largest of them; a variable if it depends on the choices."""
        least = max(need for need in needs if isinstance(need, int))
        variable = [need for need in needs if not isinstance(need, int)]
        if not variable:
            return least
        reserve = self._variables.model.add_var(lb=least)
        for need in variable:
            self._variables.model += reserve >= need
        return reserve

    def _alive(self, value: int, time: int) -> Expr:
        full = self._graph.values[value].nbytes
        return (full * self._copy(value, time) if full else 0) + self._payload(value, time)

    def _copy(self, value: int, time: int) -> Expr:
        """Whether the full-size copy is alive."""
        if value not in self._schedule.first:
            return self._copy_for_replays(value, time)
        if time < self._schedule.first[value]:
            return self._copy_before_first_event(value, time)
        if time <= self._schedule.last[value]:
            return 1
        runs = [self._runs_from(op, time) for op in self._schedule.late_readers(value, time)]
        return self._any([*runs, *self._retained(value, time)])

    def _copy_before_first_event(self, value: int, time: int) -> Expr:
        """The first event that lists it is yet to come.

        The copy is alive if the value was kept uncompressed, if a replay has read it, or if its op has run for another
        output.
        """
        variables = self._variables
        reasons = [variables.uncompressed(value)]
        reasons += [variables.ran_by(op, time) for op in self._schedule.early_readers(value, time)]
        reasons += [ran - variables.compressed(value) for ran in self._made_along(value, time)]
        return self._any(reasons)

    def _copy_for_replays(self, value: int, time: int) -> Expr:
        """No event lists it, only replays read it.

        The copy is alive if a reader runs now, or if a reader is yet to run and the copy was made earlier.
        """
        variables = self._variables
        early = self._schedule.early_readers(value, time)
        made_along = self._made_along(value, time)
        if not early and not made_along:
            return variables.uncompressed(value)
        had = [ran - variables.stored(value) for ran in made_along]
        had += [variables.uncompressed(value)] if self._graph.values[value].storable else []
        runs_now = [op for op in early if time in self._schedule.times[op]]
        reasons = [variables.ran_by(op, time) - variables.ran_by(op, time - 1) for op in runs_now]
        for late in self._schedule.late_readers(value, time):
            others = [variables.ran_by(op, time) for op in early if op != late]
            reasons += [was + self._runs_from(late, time) - 1 for was in had + others]
        return self._any([*reasons, *self._retained(value, time)])

    def _payload(self, value: int, time: int) -> Expr:
        """Bytes of the payload, if it is still held."""
        if time > self._graph.kept_until[value]:
            return 0
        return mip.xsum(offer.payload_bytes * chosen for offer, chosen in self._variables.compressions(value))

    def _retained(self, value: int, time: int) -> list[Expr]:
        """Whether the value is retained, and still held."""
        return [self._variables.retained(value)] if time <= self._graph.kept_until[value] else []

    def _runs_from(self, op: int, time: int) -> mip.LinExpr:
        """Whether an op is replayed at this event or a later one."""
        return self._variables.runs(op) - self._variables.ran_by(op, time - 1)

    def _made_along(self, value: int, time: int) -> list[Expr]:
        """Whether the producer has run by this event, if it can have run for another of its outputs."""
        op = self._graph.values[value].producer
        if op not in self._schedule.times or self._schedule.latest_run(op, time) is None:
            return []
        several = sum(self._schedule.used(output) for output in self._graph.ops[op].outputs) > 1
        return [self._variables.ran_by(op, time)] if several else []

    def _any(self, reasons: list[Expr]) -> Expr:
        """A variable that is 1 if one of `reasons` is, and 0 without reasons. The same reasons share a variable."""
        present = [mip.xsum([reason]) for reason in reasons if not isinstance(reason, int)]
        if not present:
            return 0
        if len(present) == 1 and not present[0].const:
            return present[0]
        key = frozenset(_key(reason) for reason in present)
        if key not in self._anys:
            self._anys[key] = self._variables.model.add_var(ub=1)
            for reason in present:
                self._variables.model += self._anys[key] >= reason
        return self._anys[key]


def _key(expression: mip.LinExpr) -> tuple:
    return (expression.const, *sorted((var.idx, factor) for var, factor in expression.expr.items()))
