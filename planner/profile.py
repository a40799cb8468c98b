"""A block graph and what was measured of it: the numbers by which the planner decides."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, overload

from ds_adacc.planner.graph import BlockGraph
from ds_adacc.planner.units import (
    By,
    Bytes,
    Error,
    GradientError,
    Guarantee,
    Seconds,
    check_count,
    check_number,
    check_numbers,
    combined,
)

RETAIN = "retain"
OFFLOAD = "offload"
_PAYLOAD_OFFLOADED = f"{OFFLOAD} "  # before the name of the codec
# Of a call's own seconds, how many may hide transfers. Operators are timed one by one, and take less in a step: a
# forward of a GPT on an H200 took 0.89 of their sum. The rest is a margin.
_HIDING = 0.75
HOPELESS = 1e12  # a gradient error from here on is as good as infinite: it is above any bound


def is_codec(store: str | None) -> TypeGuard[str]:
    """Whether a value stored so is held as a codec's payload, on its device or in host memory."""
    return store not in (None, RETAIN, OFFLOAD)


def is_offloaded(store: str | None) -> TypeGuard[str]:
    """Whether a value stored so waits in host memory, as it is or as a codec's payload."""
    return store is not None and (store == OFFLOAD or store.startswith(_PAYLOAD_OFFLOADED))


def payload_offloaded(codec: str) -> str:
    """The store of a value whose payload of this codec waits in host memory."""
    return _PAYLOAD_OFFLOADED + codec


def nearest_offer(store: str, offers: Collection[str]) -> str:
    """The store, or as much of it as is in `offers`: its codec, its copy to host memory, both or neither."""
    codec = on_device(store)
    kept = codec if codec in offers else RETAIN
    if not is_offloaded(store) or OFFLOAD not in offers:
        return kept
    return OFFLOAD if kept == RETAIN else payload_offloaded(kept)


@overload
def on_device(store: str) -> str: ...
@overload
def on_device(store: None) -> None: ...
@overload
def on_device(store: str | None) -> str | None: ...
def on_device(store: str | None) -> str | None:
    """The same store without the copy to host memory: of an offloaded payload the codec's name."""
    return RETAIN if store == OFFLOAD else store and store.removeprefix(_PAYLOAD_OFFLOADED)


@dataclass(frozen=True)
class CodecCost:
    """What one codec does to one value (the paper's CRate, T_c and T_dc; section 3.3, equations 4 and 8).

    `nbytes` is the size of the payload on the device, `error` the measured relative error ||x - x'|| / ||x||.
    `workspace_bytes` is what a compression or decompression allocates besides. `gradient_error` is the relative error
    of the block's gradient if this value alone is compressed with this codec, and the ops whose input and output
    backward reads together are replayed on it. `lossless`: no data come back changed. A lossy codec has an error of 0,
    too, while the data suit it, as zeros do.

    What is offloaded waits in host memory: `moved_bytes` of it. A copy of these to the host takes `out_seconds`, and
    one back `back_seconds`. A value that is offloaded as it is costs what `CodecCost.offload` says.

    Raises ValueError for a negative or non-finite number, and for an error of a lossless codec.
    """

    codec: str
    nbytes: Bytes
    compress_seconds: Seconds
    decompress_seconds: Seconds
    error: Error
    workspace_bytes: Bytes
    gradient_error: GradientError = 0.0
    lossless: Guarantee = False
    moved_bytes: Bytes = 0
    out_seconds: Seconds = 0.0
    back_seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.codec == RETAIN:
            raise ValueError(
                f"a codec is named {RETAIN!r}, which means that a value is kept as it is: name it otherwise"
            )
        check_numbers(self, "codec", self.codec)
        if self.lossless and (self.error or self.gradient_error):
            raise ValueError(
                f"codec {self.codec!r} is lossless, but has error = {self.error} and gradient_error = "
                f"{self.gradient_error}: both must be 0"
            )

    @classmethod
    def offload(cls, nbytes: int, out_seconds: float, back_seconds: float) -> CodecCost:
        """The cost of offloading a value of `nbytes`, at least 1, as it is."""
        moved = {"moved_bytes": nbytes, "out_seconds": out_seconds, "back_seconds": back_seconds}
        return cls(OFFLOAD, 0, 0.0, 0.0, error=0.0, workspace_bytes=0, lossless=True, **moved)

    @property
    def seconds(self) -> float:
        """Compression in forward plus decompression in backward. Copies to the host and back run beside operators."""
        return self.compress_seconds + self.decompress_seconds

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload wherever it is; of an offloaded value those of the value."""
        return self.nbytes + self.moved_bytes


def combined_offers(offers: Sequence[Sequence[CodecCost]], by: By) -> tuple[CodecCost, ...]:
    """One cost of several (see `combined`) for each codec that a value is offered in all of these measurements."""
    costs_of = [{cost.codec: cost for cost in costs} for costs in offers]
    shared = (codec for codec in costs_of[0] if all(codec in costs for costs in costs_of))
    return tuple(combined([costs[codec] for costs in costs_of], by) for codec in shared)


@dataclass(frozen=True)
class Profile:
    """A graph, the replay time of each op in seconds, and what was measured of the codecs of each value.

    `offers` has all ways to store a value. `overlap_seconds` are the seconds of one call's forward and of its backward:
    transfers to and from the host run beside them. `noise` is the fraction by which a second measurement of the seconds
    differs. `stale_errors`: per op, the relative error of the block's gradient if the op is stale (see
    `gradient_error`); () if that was not measured. Raises ValueError if lengths do not match the graph, a time is
    negative or not finite, a codec is offered twice, or one is offered for a value that cannot be stored.
    """

    graph: BlockGraph
    op_seconds: tuple[Seconds, ...]
    codecs: tuple[tuple[CodecCost, ...], ...]
    overlap_seconds: tuple[Seconds, Seconds] = (0.0, 0.0)
    noise: float = 0.0
    stale_errors: tuple[GradientError, ...] = ()

    @property
    def hiding_seconds(self) -> tuple[float, float]:
        """How long transfers may take in one call's forward, and in its backward, without a stall."""
        forward, backward = self.overlap_seconds
        return _HIDING * forward, _HIDING * backward

    def __post_init__(self) -> None:
        _check_length("op_seconds", len(self.op_seconds), "ops", len(self.graph.ops))
        _check_length("codecs", len(self.codecs), "values", len(self.graph.values))
        check_number("noise", self.noise)
        if self.stale_errors:
            _check_length("stale_errors", len(self.stale_errors), "ops", len(self.graph.ops))
        for op, error in zip(self.graph.ops, self.stale_errors, strict=False):
            check_number(f"stale_errors of op {op.name!r}", error)
        for which, seconds in zip(("forward", "backward"), self.overlap_seconds, strict=True):
            check_number(f"overlap_seconds of {which}", seconds)
        for op, seconds in zip(self.graph.ops, self.op_seconds, strict=True):
            check_number(f"op_seconds of op {op.name!r}", seconds)
        for value, offers in zip(self.graph.values, self.codecs, strict=True):
            names = [offer.codec for offer in offers]
            if len(set(names)) != len(names):
                raise ValueError(f"value {value.name!r} is offered codecs {names}: each must appear once")
            if names and not value.storable:
                raise ValueError(f"value {value.name!r} is offered codecs {names}, but is not storable: offer none")

    @functools.cached_property
    def offers(self) -> tuple[tuple[CodecCost, ...], ...]:
        """All but `RETAIN` that is on offer for each value: codecs, `OFFLOAD`, and codecs with offloaded payloads."""
        return tuple(map(_with_offloaded_payloads, self.codecs))

    def offers_within(self, value: int, max_gradient_error: float | None) -> tuple[CodecCost, ...]:
        """The offers for a value that keep the bound by themselves: what a search chooses from.

        Of the offloaded payloads it has the smallest alone. With all of them a search has more to try, for plans that
        are hardly better.
        """
        bound = math.inf if max_gradient_error is None else max_gradient_error
        fine = [offer for offer in self.offers[value] if offer.gradient_error <= bound]
        payloads = [offer for offer in fine if is_codec(offer.codec) and is_offloaded(offer.codec)]
        smallest = min(payloads, key=lambda offer: offer.moved_bytes, default=None)
        return tuple(offer for offer in fine if offer not in payloads or offer is smallest)

    def codec(self, value: int, name: str) -> CodecCost:
        """The cost of storing value number `value` so; ValueError if that is not on offer."""
        for offer in self.offers[value]:
            if offer.codec == name:
                return offer
        raise ValueError(
            f"value {self.graph.values[value].name!r} is stored as {name!r}; "
            f"on offer are {[RETAIN, *(offer.codec for offer in self.offers[value])]}"
        )


@dataclass(frozen=True)
class Strictness:
    """How the gradient errors of some blocks differ from those of their block type's profile.

    `factors`: per value, what the errors of its codecs are multiplied by; `HOPELESS`: no lossy codec may hold it.
    `stale_errors`: per op, at least this error if it is stale.
    """

    factors: tuple[float, ...]
    stale_errors: tuple[float, ...]

    def applied_to(self, profile: Profile) -> Profile:
        """The profile with the gradient errors of these blocks."""
        codecs = tuple(
            tuple(
                offer if offer.lossless else replace(offer, gradient_error=offer.gradient_error * factor)
                for offer in offers
                if offer.lossless or (factor < HOPELESS and offer.gradient_error * factor < HOPELESS)
            )
            for offers, factor in zip(profile.codecs, self.factors, strict=True)
        )
        known = profile.stale_errors or (0.0,) * len(profile.graph.ops)
        stale = tuple(max(pair) for pair in zip(known, self.stale_errors, strict=True))
        return replace(profile, codecs=codecs, stale_errors=stale)

    def stricter(self, other: Strictness) -> Strictness:
        """The larger of the two errors everywhere."""
        pairs = zip(self.factors, other.factors, strict=True), zip(self.stale_errors, other.stale_errors, strict=True)
        return Strictness(*(tuple(max(pair) for pair in each) for each in pairs))


@dataclass(frozen=True)
class BlockType:
    """A block type: `count` of its calls are alive at once (the paper's N_layer, equation 8), at least 1.

    Each block is called `calls_per_block` times, a divisor of `count`; all calls of a block have one policy.
    `strictness`: per block in forward order, how its gradient errors differ from the profile's; None: they do not. ():
    those of no block do.
    """

    name: str
    profile: Profile
    count: int
    calls_per_block: int = 1
    strictness: tuple[Strictness | None, ...] = ()

    def __post_init__(self) -> None:
        for field in ("count", "calls_per_block"):
            check_count(f"{field} of block type {self.name!r}", getattr(self, field))
            if getattr(self, field) == 0:
                raise ValueError(
                    f"{field} of block type {self.name!r} is 0; leave the block type out or give at least 1"
                )
        if self.count % self.calls_per_block:
            raise ValueError(
                f"calls_per_block of {self.name!r} is {self.calls_per_block}; it must divide its {self.count} calls"
            )
        if self.strictness:
            _check_length("strictness", len(self.strictness), f"blocks of {self.name!r}", self.blocks)

    @property
    def blocks(self) -> int:
        """How many blocks there are, each of which may have a policy of its own."""
        return self.count // self.calls_per_block


def _with_offloaded_payloads(costs: Sequence[CodecCost]) -> tuple[CodecCost, ...]:
    link = next((cost for cost in costs if cost.codec == OFFLOAD), None)
    codecs = [cost for cost in costs if cost.codec != OFFLOAD and cost.nbytes]
    return (*costs, *(_payload_offloaded(cost, link) for cost in codecs)) if link is not None else tuple(costs)


def _payload_offloaded(cost: CodecCost, link: CodecCost) -> CodecCost:
    """The cost of a codec whose payload is copied at the speed of the value itself, which `link` has."""
    share = cost.nbytes / link.moved_bytes
    return replace(
        cost,
        codec=payload_offloaded(cost.codec),
        nbytes=0,
        moved_bytes=cost.nbytes,
        out_seconds=share * link.out_seconds,
        back_seconds=share * link.back_seconds,
    )


def _check_length(what: str, length: int, of: str, expected: int) -> None:
    if length != expected:
        raise ValueError(f"{what} has {length} entries; there are {expected} {of}")
