"""What this process knows of one block type: its program, what was measured, and the policies agreed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ds_adacc import planner
from ds_adacc.kernels import separates_outliers
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.plan import Policies
from ds_adacc.record.recording import Recording


@dataclass
class BlockType:
    """Blocks with the same program, hence the same profile, and policies that are planned together.

    `count` is how many calls are alive at once, `calls_per_block` how many of each block; `capacity` the number of
    outlier channels kept raw for each value that an outlier codec may hold. `policies`, of the blocks in forward order,
    is None until they have been agreed; `agreed` is what they were agreed for. `correction` is what the profile was
    found to be wrong by; None while nothing has been measured here, nor agreed with other ranks.
    """

    recording: Recording
    profile: planner.Profile
    count: int = 1
    calls_per_block: int = 1
    capacity: dict[int, int] = field(default_factory=dict)
    policies: Policies | None = None
    agreed: planner.BlockType | None = None
    correction: Correction | None = None

    def policy(self, place: int | None) -> planner.Policy:
        """Of the block at `place` in forward order. What holds least for one that was not planned for.

        Until policies are agreed, everything proven is recomputed.
        """
        if self.policies is None or self.agreed is None:
            return planner.recompute_policy(self.profile)
        if place is not None and place < len(self.policies):
            return self.policies[place]
        profile = self.agreed.profile
        return min(self.policies, key=lambda policy: policy.held_bytes(profile))

    def held_bytes(self, place: int | None) -> int:
        """What one call of that block holds by the policies in force; 0 before there are any."""
        return self.policy(place).held_bytes(self.agreed.profile) if self.policies and self.agreed else 0

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
        """The codec that holds the outliers of a value apart, or may do so; INT4's where none does any more."""
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
