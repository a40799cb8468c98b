"""What an outlier codec's payload takes: its bytes depend on how many channels it keeps raw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ds_adacc import planner
from ds_adacc.execute.course import flat
from ds_adacc.kernels import separates_outliers
from ds_adacc.plan.block_type import KnownType
from ds_adacc.profile.codec_maker import CodecMaker


class OutlierPrices:
    """Prices outlier codecs at a capacity: the number of channels that they keep raw."""

    def __init__(self, codecs: CodecMaker) -> None:
        self._codecs = codecs

    def payload_bytes(self, name: str, known: KnownType, index: int, capacity: int) -> int:
        """Bytes of the payload of the codec `name` for the value `index`."""
        value = known.recording.values[index]
        cpu = torch.device("cpu")
        codec = self._codecs.make(name, cpu, torch.zeros(capacity, dtype=torch.long, device=cpu))
        return codec.payload_bytes(flat(value).size, value.geometry.dtype)

    def at_capacity(
        self, profile: planner.Profile, known: KnownType | None, capacity: Mapping[int, int]
    ) -> planner.Profile:
        """The profile at these capacities, by value. That of a block type that this rank has not run stays as it is."""
        if known is None:
            return profile
        codecs = list(profile.codecs)
        for index, channels in capacity.items():
            names = [cost.codec for cost in codecs[index] if separates_outliers(cost.codec)]
            sizes = {name: self.payload_bytes(name, known, index, channels) for name in names}
            codecs[index] = tuple(replace(cost, nbytes=sizes.get(cost.codec, cost.nbytes)) for cost in codecs[index])
        return replace(profile, codecs=tuple(codecs))
