"""Blocks with one program are of one block type: what this process knows of it, and what all ranks have agreed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ds_adacc import planner
from ds_adacc.kernels import separates_outliers
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.plan import Policies
from ds_adacc.record.recording import Recording


@dataclass(frozen=True)
class AgreedType:
    """What a planning gives for one block type, the same on every rank. The next planning replaces it as a whole.

    `spec` is what the planner planned for; `policies` are those of the blocks in forward order. `capacity` is how many
    outlier channels each value keeps raw, by value index. `correction` is by how many bytes the measured profile was
    found to be wrong; `spec.profile` includes it.
    """

    spec: planner.BlockType
    policies: Policies
    capacity: Mapping[int, int]
    correction: Correction

    def policy(self, block_index: int | None) -> planner.Policy:
        """The policy of the block with this index. A block that was not planned for gets the one that holds least."""
        if block_index is not None and block_index < len(self.policies):
            return self.policies[block_index]
        return min(self.policies, key=lambda policy: policy.held_bytes(self.spec.profile))


@dataclass
class KnownType:
    """What this process knows of a block type.

    `count` calls of it are alive at once, `calls_per_block` of each block. `outlier_channels` is the most that any of
    its blocks has shown here, by value index; it is the capacity until one is agreed. `agreed` is None until the ranks
    have planned for it.
    """

    recording: Recording
    profile: planner.Profile
    count: int = 1
    calls_per_block: int = 1
    outlier_channels: dict[int, int] = field(default_factory=dict)
    agreed: AgreedType | None = None

    @property
    def policies(self) -> Policies | None:
        """The policies in force, of the blocks in forward order; None until they have been agreed."""
        return None if self.agreed is None else self.agreed.policies

    @property
    def capacity(self) -> Mapping[int, int]:
        """Outlier channels kept raw, by value index."""
        return self.outlier_channels if self.agreed is None else self.agreed.capacity

    def policy(self, block_index: int | None) -> planner.Policy:
        """The policy in force for the block with this index. Until one is agreed, all that may be is recomputed."""
        return planner.recompute_policy(self.profile) if self.agreed is None else self.agreed.policy(block_index)

    def held_bytes(self, block_index: int | None) -> int:
        """Bytes that one call of that block holds by the policies in force; 0 before there are any."""
        return 0 if self.agreed is None else self.policy(block_index).held_bytes(self.agreed.spec.profile)

    def note_outliers(self, index: int, count: int) -> None:
        """A block of this type has shown so many outlier channels in the value `index`."""
        self.outlier_channels[index] = max(count, self.outlier_channels.get(index, 0))

    @property
    def outlier_values(self) -> list[int]:
        """Values that a codec which separates outliers may hold."""
        offers = [[separates_outliers(cost.codec) for cost in costs] for costs in self.profile.codecs]
        return [index for index, separating in enumerate(offers) if self._holds_outliers(index) or any(separating)]

    def tracked_values(self, roles: Sequence[str]) -> list[int]:
        """Those of these roles, and those that an outlier codec does hold: its channels are to be kept fresh."""
        values = self.recording.values
        return [i for i in self.outlier_values if values[i].role in roles or self._holds_outliers(i)]

    def outlier_codec(self, index: int) -> str:
        """The codec that keeps the outliers of a value raw, or may do so; INT4's where none does any more."""
        stored = (policy.stores[index] for policy in self.policies or ())
        names = *stored, *(cost.codec for cost in self.profile.codecs[index]), "outlier"
        return next(name for name in names if separates_outliers(name))

    def narrow(self, offers: Sequence[Sequence[str]]) -> None:
        """Offer, from the next planning on, only the codecs that this block too may use, by value."""
        kept = [
            tuple(c for c in costs if c.codec in names)
            for costs, names in zip(self.profile.codecs, offers, strict=True)
        ]
        self.profile = replace(self.profile, codecs=tuple(kept))

    def _holds_outliers(self, index: int) -> bool:
        return any(separates_outliers(policy.stores[index]) for policy in self.policies or ())
