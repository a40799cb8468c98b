"""Put policies in force: bind the policy of each block to its program, with the codecs that the policy names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ds_adacc import planner
from ds_adacc.execute.bound_policy import BoundPolicy, bind
from ds_adacc.execute.bound_segment import Updates
from ds_adacc.execute.course import Course
from ds_adacc.execute.host_offload import CudaTransfer, Prefetcher
from ds_adacc.execute.input_placement import PARTITION, InputPlacement
from ds_adacc.execute.variant import Variant
from ds_adacc.kernels import Codec, separates_outliers
from ds_adacc.plan.block_type import KnownType
from ds_adacc.profile.codec_maker import CodecMaker


class Binder:
    """Binds variants to the policies of their block types, and owns what offloaded values need.

    `device`: the one on which the blocks run; None before any has run.
    """

    def __init__(self, codecs: CodecMaker) -> None:
        self.device: torch.device | None = None
        self._codecs = codecs
        self._prefetcher: Prefetcher | None = None
        self._updates = Updates()

    def set_policy(self, variant: Variant, known: KnownType, policy: planner.Policy, inputs: InputPlacement) -> None:
        """Have the variant run the policy from its next call on, with the outlier channels last found by then.

        `inputs` says how the block inputs that the policy retains are held.
        """

        def bind_to(variant: Variant) -> BoundPolicy:  # not the one outside: that would hold itself (Rule E13)
            held = inputs.applied(policy, self._permitted(policy, variant), variant.recording)
            return self._bound(variant, known, held, inputs, known.course(variant.recording, held))

        variant.policy = policy
        variant.bind_later(bind_to)

    def note_device(self, device: torch.device) -> None:
        """Note the device on which a block runs. An accelerator counts more than the CPU."""
        if self.device is None or self.device.type == "cpu":
            self.device = device

    def note_update(self) -> None:
        """Note a step of the optimizer: no call before it can replay what reads parameters any more."""
        self._updates.count += 1

    def reserve(self, variants: Iterable[tuple[Variant, int]]) -> None:
        """Get host memory for what these variants offload: each with the number of its calls in a forward."""
        sizes = [
            variant.bound.moved_bytes(index)
            for variant, calls in variants
            if variant.bound.prefetcher is not None
            for index, *_ in variant.bound.offloaded
            for _ in range(calls)
        ]
        if self._prefetcher is not None:
            self._prefetcher.reserve(sizes)

    def pass_over(self) -> None:
        """Note a call of a block that offloads nothing."""
        if self._prefetcher is not None:
            self._prefetcher.pass_over()

    def bound_to_measure(self, variant: Variant, known: KnownType, policy: planner.Policy) -> BoundPolicy:
        """The policy, bound for a measurement of its error: what it offloads stays, for a copy changes nothing."""
        return self._bound(variant, known, self._permitted(policy.on_device, variant), InputPlacement())

    def _bound(
        self,
        variant: Variant,
        known: KnownType,
        policy: planner.Policy,
        inputs: InputPlacement,
        course: Course | None = None,
    ) -> BoundPolicy:
        codecs: dict[int, Codec] = {}
        for index, choice in enumerate(policy.stores):
            if choice == PARTITION:
                codecs[index] = inputs.codec(self._device_of(variant, index))
            elif planner.is_codec(choice):
                name, channels = planner.on_device(choice), None
                if separates_outliers(name):
                    channels = variant.outliers[index][0][: known.capacity[index]]
                codecs[index] = self._codecs.make(name, self._device_of(variant, index), channels)
        if self._prefetcher is None and any(map(planner.is_offloaded, policy.stores)):
            assert self.device is not None  # that of the recorded block
            self._prefetcher = Prefetcher(CudaTransfer(self.device))
        return bind(variant.recording, policy, codecs, self._prefetcher, course, self._updates)

    def _device_of(self, variant: Variant, index: int) -> torch.device:
        """Where the value lies: a block that runs on an accelerator may have values on the host."""
        kind = variant.recording.values[index].device
        return self.device if self.device is not None and self.device.type == kind else torch.device(kind)

    def has_all_losses(self, variant: Variant, policy: planner.Policy, profile: planner.Profile) -> bool:
        """Whether calls of the variant compress all that the policy compresses with a loss, and retain none of it.

        `profile`: that for which the policy was made.
        """
        stores, wanted = self._permitted(policy, variant).on_device.stores, policy.on_device.stores
        return all(stores[index] == wanted[index] for index in policy.lossy_values(profile))

    def _permitted(self, policy: planner.Policy, variant: Variant) -> planner.Policy:
        """The policy, but a value that its codec cannot hold is kept as it is, and one too small to offload stays.

        A codec cannot if the value has Inf (a score, for example), or if it is not known which channels are outliers.
        """
        stores = list(policy.stores)
        for index, store in enumerate(stores):
            if store not in (None, planner.RETAIN):
                offers = self._codecs.on_offer(variant.recording.values[index], variant.recording)
                known = [name for name in offers if index in variant.outliers or not separates_outliers(name)]
                stores[index] = planner.nearest_offer(store, known)
        return planner.Policy(tuple(stores))
