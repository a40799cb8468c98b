"""Which policies blocks may run: those whose gradient error, measured on the block itself, is within the bound."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ds_adacc import planner
from ds_adacc.kernels import separates_outliers
from ds_adacc.plan.block_type import TypePlan
from ds_adacc.profile.gradient_error import PolicyError

BlockKey = tuple[str, int | None]  # a block type, and the index of one of its blocks in forward order; None: unknown
Approved = tuple[tuple[planner.Policy, float], ...]  # each with its error
PolicyErrors = Sequence[tuple[BlockKey, PolicyError]]  # the worst of each policy of a block, as `worst` returns them

_MOST_REJECTIONS = 4  # in a row; then the block gets no lossy codecs: the estimates of its errors do not converge
_MOST_KINDS = 2  # of strictness in one block type: each is a block type of its own for the solver
MARGIN = 0.9  # of the bound: the planner aims so far below it, since estimates scatter and each rejection costs a step
_STEP = 1.25  # strictness is rounded up to powers of this, so that blocks with like errors share one


@dataclass(frozen=True)
class BlockErrors:
    """What was measured of one block. `approved` holds its approved policies, each with its largest gradient error.

    Policies are held without their copies to host memory, which change no data (`Policy.on_device`). `strictness`: how
    the block's errors exceed the estimates. `rejections`: how many policies were above the bound since the last one was
    approved for the first time, and `rejected`: the last of them. `outdated`: those that were approved before another
    one was rejected. They may run once they are approved again.
    """

    approved: Approved = ()
    strictness: planner.Strictness | None = None
    rejections: int = 0
    rejected: planner.Policy | None = None
    outdated: frozenset[planner.Policy] = frozenset()

    def approve(self, policy: planner.Policy, error: float) -> BlockErrors:
        """With this policy approved. If it is an outdated one, that ends no row of rejections.

        Otherwise two sizes of the block, of which one approves and the other rejects, might go on for ever.
        """
        earlier = dict(self.approved)
        approved = (*_without(self.approved, {policy}), (policy, max(error, earlier.get(policy, 0.0))))
        rejections = self.rejections if policy in self.outdated else 0
        return replace(self, approved=approved, rejections=rejections, rejected=None)

    def outdate(self, but: Collection[planner.Policy]) -> BlockErrors:
        """With all approvals outdated `but` those of these policies: the block's errors are not what they were."""
        old = {policy for policy, _ in self.approved}.difference(but)
        return replace(self, approved=_without(self.approved, old), outdated=self.outdated | old)


class Approvals:
    """The measured errors of the blocks, the same on all ranks. `max_error`: the bound; None: every policy may run."""

    def __init__(self, max_error: float | None) -> None:
        self.max_error = max_error
        self.blocks: dict[BlockKey, BlockErrors] = {}

    @property
    def bound(self) -> float:
        """The bound, which is infinite if every policy may run."""
        return math.inf if self.max_error is None else self.max_error

    @property
    def aim(self) -> float | None:
        """The bound for the planner."""
        return None if self.max_error is None else MARGIN * self.max_error

    def permit(self, key: BlockKey, policy: planner.Policy, profile: planner.Profile) -> bool:
        """Whether the block may run the policy: it is approved, or nothing in it is lossy.

        Blocks of unknown index have one key, so that what is measured of one of them says nothing of the others.
        """
        if self.max_error is None or not policy.lossy_values(profile):
            return True
        return key[1] is not None and self.error(key, policy) is not None

    def is_rejected(self, key: BlockKey, policy: planner.Policy) -> bool:
        """Whether the policy was measured above the bound: to try it again would tell nothing new."""
        return self._of(key).rejected == policy.on_device

    def knows(self, key: BlockKey, policy: planner.Policy) -> bool:
        """Whether the policy was measured on the block: it is approved, or it was the last to be rejected."""
        return self.is_rejected(key, policy) or self.error(key, policy) is not None

    def error(self, key: BlockKey, policy: planner.Policy) -> float | None:
        """The largest relative error measured of an approved policy; None if it was not measured."""
        return dict(self._of(key).approved).get(policy.on_device)

    def in_force(self, plans: Iterable[TypePlan]) -> dict[BlockKey, float]:
        """The largest measured errors of the policies in force, by block."""
        blocks = ((each.spec.name, i, policy) for each in plans for i, policy in enumerate(each.policies))
        errors = {(name, i): self.error((name, i), policy) for name, i, policy in blocks}
        return {key: error for key, error in errors.items() if error is not None}

    def judge(self, measured: PolicyErrors) -> dict[BlockKey, PolicyError]:
        """Approve or reject the policies that the ranks have measured.

        A rejection outdates what was approved of the block before: the errors of its values may have grown since.

        Returns those that were rejected: of a block that ran several at several sizes, the one with the largest error.
        """
        rejected: dict[BlockKey, PolicyError] = {}
        for key, found in measured:
            known, policy = self._of(key), found.policy.on_device
            if found.error <= self.bound:
                self.blocks[key] = known.approve(policy, found.error)
                continue
            rejections = known.rejections + (key not in rejected)
            rejected[key] = found
            assert found.strictness is not None  # measured with each error above the bound
            stricter = _rounded(found.strictness)
            if rejections >= _MOST_REJECTIONS:
                stricter = _without_lossy_codecs(stricter)
            if known.strictness is not None and known.rejections:  # what an earlier search found may no longer hold
                stricter = stricter.stricter(known.strictness)
            known = known.outdate({other.policy.on_device for of, other in measured if of == key})
            approved = _without(known.approved, {policy})
            self.blocks[key] = replace(
                known, approved=approved, strictness=stricter, rejections=rejections, rejected=policy
            )
        return rejected

    def strictness(self, name: str, blocks: int) -> tuple[planner.Strictness | None, ...]:
        """The strictness of each block of a block type, in forward order; () if none has one.

        Few distinct ones are told apart; but a block that gets no lossy codecs takes no other one along. Blocks that
        share one policy share the strictest.
        """
        found = {index: known.strictness for (digest, index), known in self.blocks.items() if digest == name}
        found = {index: strictness for index, strictness in found.items() if strictness is not None}
        if not found:
            return ()
        strictest = functools.reduce(planner.Strictness.stricter, found.values())
        if any(index is None or index >= blocks for index in found):
            return (strictest,) * blocks
        others = {index: each for index, each in found.items() if each != _without_lossy_codecs(each)}
        if len(set(others.values())) > _MOST_KINDS:
            found |= dict.fromkeys(others, functools.reduce(planner.Strictness.stricter, others.values()))
        return tuple(found.get(index) for index in range(blocks))

    def are_rising(self, measured: PolicyErrors) -> bool:
        """Whether an error has grown, and would be above the bound if it grew by the same factor once more.

        It has grown if it is larger than all that were measured of its policy before. Errors differ from batch to batch
        by half their size and more. So a comparison with the last one would find growth at every other look.
        """
        pairs = ((found.error, self.error(key, found.policy)) for key, found in measured)
        grown = ((now, before) for now, before in pairs if before is not None and now > before)
        return any(not before or now * (now / before) > self.bound for now, before in grown)

    def forget_all_but(self, names: Iterable[str]) -> None:
        """Forget the blocks of all other block types."""
        kept = set(names)
        self.blocks = {key: known for key, known in self.blocks.items() if key[0] in kept}

    def forget(self, names: Collection[str]) -> None:
        """Forget the blocks of these block types."""
        self.forget_all_but({digest for digest, _ in self.blocks}.difference(names))

    def withdraw(self, name: str, values: Collection[int]) -> None:
        """Withdraw the approved policies of a block type that separate other channels of these values than before."""

        def stays(policy: planner.Policy) -> bool:
            return not any(separates_outliers(policy.stores[value]) for value in values)

        for key, known in self.blocks.items():
            if key[0] == name:
                approved = tuple((policy, error) for policy, error in known.approved if stays(policy))
                self.blocks[key] = replace(known, approved=approved)

    def _of(self, key: BlockKey) -> BlockErrors:
        return self.blocks.get(key, BlockErrors())


def worst(everyone: Iterable[tuple[BlockKey, PolicyError]]) -> PolicyErrors:
    """By block and policy, the largest error on any rank and the strictest strictness; the largest errors come last."""
    merged: dict[tuple[BlockKey, planner.Policy], PolicyError] = {}
    for key, found in everyone:
        known = merged.get((key, found.policy))
        if known is not None:
            kinds = [each.strictness for each in (known, found) if each.strictness is not None]
            strictest = functools.reduce(planner.Strictness.stricter, kinds) if kinds else None
            found = replace(found, error=max(known.error, found.error), strictness=strictest)
        merged[key, found.policy] = found
    return sorted(((key, found) for (key, _), found in merged.items()), key=lambda each: each[1].error)


def _without(approved: Approved, policies: Collection[planner.Policy]) -> Approved:
    return tuple((policy, error) for policy, error in approved if policy not in policies)


def _without_lossy_codecs(strictness: planner.Strictness) -> planner.Strictness:
    return replace(strictness, factors=(planner.HOPELESS,) * len(strictness.factors))


def _rounded(strictness: planner.Strictness) -> planner.Strictness:
    """Each number rounded up to a power of `_STEP`."""

    def up(number: float) -> float:
        return min(_STEP ** math.ceil(math.log(number, _STEP)), planner.HOPELESS) if number > 0 else 0.0

    return planner.Strictness(tuple(map(up, strictness.factors)), tuple(map(up, strictness.stale_errors)))
