"""The planner's answer for one block type: what each value becomes between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_adacc.planner.graph import BlockGraph
from ds_adacc.planner.profile import RETAIN, Profile, is_codec, on_device


@dataclass(frozen=True)
class Policy:
    """Per value `"retain"`, `"offload"`, a codec's name, `"offload "` before such a name, or None: not stored.

    What backward replays follows from that: `BlockGraph.replayed`.
    """

    stores: tuple[str | None, ...]

    def check(self, profile: Profile) -> None:
        """Raise ValueError unless the policy can be carried out on this profile (paper, equations 5 and 6).

        Every value that backward or a replayed op reads must be stored, or made by an op that may be replayed. Only
        storable values may be stored, with codecs on offer.
        """
        self._check_stores(profile)
        graph = profile.graph
        for event in graph.events:
            asked = [value for value in event.values if not graph.values[value].lent]
            self._check_at_hand(graph, f"event {event.name!r}", asked)
        for index in reversed(graph.replayed(self.stores)):  # backwards: readers are visited before makers
            op = graph.ops[index]
            self._check_at_hand(graph, f"replayed op {op.name!r}", op.inputs)

    @property
    def on_device(self) -> Policy:
        """The same without copies to host memory: what it does to the data."""
        return Policy(tuple(map(on_device, self.stores)))

    def lending(self, profile: Profile, lends: bool = True) -> Policy:
        """The same, with the values retained that are lent (`Value.lent`); without `lends` they are not stored."""
        lent, pairs = RETAIN if lends else None, zip(profile.graph.values, self.stores, strict=True)
        return Policy(tuple(lent if value.lent else store for value, store in pairs))

    def with_asked(self, graph: BlockGraph) -> Policy:
        """The same, with the inputs retained that backward asks for.

        Of an input that another block saves, that may not have been known when the policy was found.
        """
        values, stores = graph.values, enumerate(self.stores)
        asked = {index for index in graph.saved if values[index].producer is None and not values[index].lent}
        return Policy(tuple(RETAIN if store is None and index in asked else store for index, store in stores))

    def is_on_offer(self, profile: Profile) -> bool:
        """Whether all stores that it names are on offer."""
        named = zip(self.stores, profile.offers, strict=True)
        return all(store in (None, RETAIN) or store in {cost.codec for cost in costs} for store, costs in named)

    def lossy_values(self, profile: Profile) -> tuple[int, ...]:
        """The values that may come back changed."""
        stores = enumerate(self.stores)
        return tuple(v for v, store in stores if is_codec(store) and not profile.codec(v, store).lossless)

    def cached_bytes(self, profile: Profile) -> int:
        """Bytes of one call that are alive beside those held until the forward of the model ends (`Value.cached`).

        Lent values that are not stored count too: the program holds them for other blocks.
        """
        pairs = zip(profile.graph.values, self.stores, strict=True)
        return sum(value.nbytes for value, store in pairs if (value.cached or value.lent) and store != RETAIN)

    def held_bytes(self, profile: Profile) -> int:
        """Bytes one call holds between its forward and its backward (a term of equation 8)."""
        return sum(self.stored_bytes(profile, value) for value in range(len(self.stores)))

    def stored_bytes(self, profile: Profile, value: int) -> int:
        """Bytes that value number `value` takes between forward and backward."""
        store = self.stores[value]
        if store is None:
            return 0
        return profile.graph.values[value].nbytes if store == RETAIN else profile.codec(value, store).nbytes

    def _check_stores(self, profile: Profile) -> None:
        values = profile.graph.values
        if len(self.stores) != len(values):
            raise ValueError(f"the policy has {len(self.stores)} stores; the graph has {len(values)} values")
        for index, store in enumerate(self.stores):
            if store is not None and not values[index].storable:
                raise ValueError(f"value {values[index].name!r} is stored as {store!r}, but is not storable")
            if store not in (None, RETAIN):
                profile.codec(index, store)

    def _check_at_hand(self, graph: BlockGraph, where: str, values: Sequence[int]) -> None:
        for index in values:
            value = graph.values[index]
            is_rebuilt = value.producer is not None and graph.ops[value.producer].replayable
            if self.stores[index] is None and not is_rebuilt:
                raise ValueError(f"{where} needs value {value.name!r}, which cannot be rebuilt: store it")
