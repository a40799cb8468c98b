"""Policies drawn by lot from all that are possible, and what they make of every saved tensor, told independently."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.config.presets import ROLES
from ds_adacc.execute.course import flat
from ds_adacc.execute.host_offload import Prefetcher
from ds_adacc.kernels import CODECS, separates_outliers
from ds_adacc.planner.profile import payload_offloaded
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.program.replay import replay

_EVERY = {role: [name for name in CODECS if name != "bits" or role == "dropout_mask"] for role in ROLES}


class HostTransfer:
    """Copies to NumPy arrays: host memory, which no count of tensors sees."""

    def out(self, tensors):
        return [
            [
                (t.reshape(-1).view(torch.uint8).numpy().copy(), torch.empty(t.shape, dtype=t.dtype, device="meta"))
                for t in tensors
            ],
            None,
        ]

    def drop(self, handle):
        pass

    def back(self, handle):
        assert handle[1] is None
        handle[1] = tuple(torch.empty(like.shape, dtype=like.dtype) for _, like in handle[0])
        for tensor, (host, _) in zip(handle[1], handle[0], strict=True):
            tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(host))

    def take(self, handle):
        tensors, handle[1] = handle[1], None
        return tensors


@dataclass
class Drawn:
    """A policy, the codecs that it names by value, and where it offloads to."""

    recording: object
    policy: planner.Policy
    codecs: dict = field(default_factory=dict)
    prefetcher: Prefetcher | None = None

    def held_bytes(self, tensors):
        """What the call holds between forward and backward: storages that it made, payloads, witnesses of offloads."""
        others = (v for v in self.recording.values if v.origin != "made" and v.nbytes)
        given = {tensors[v.index].untyped_storage()._cdata for v in others}
        storages, total = {}, 0
        for value, choice in zip(self.recording.values, self.policy.stores, strict=True):
            if choice == planner.RETAIN:
                storage = tensors[value.index].untyped_storage()
                storages[storage._cdata] = storage.nbytes()
            elif choice == planner.OFFLOAD:
                total += value.geometry.dtype.itemsize
            elif choice is not None and not planner.is_offloaded(choice):
                total += self.codecs[value.index].payload_bytes(flat(value).size, value.geometry.dtype)
        return total + sum(nbytes for storage, nbytes in storages.items() if storage not in given)

    @property
    def is_lossy(self):
        return any(not codec.lossless for codec in self.codecs.values())

    @property
    def choices(self):
        """The actions that occur."""
        stores = {choice for choice in self.policy.stores if choice is not None}
        return stores | ({"recompute"} if self.recording.segments.replayed(self.policy.stores) else set())


def draw(recording, graph, tensors, lot, lossy):
    """A feasible policy; each value's fate is drawn by lot, but codecs that are not exact only if `lossy`."""
    maker = _maker(lot)
    share = lot.random()
    stores, replays, decided = [None] * len(graph.values), set(), set()
    pending = sorted(graph.saved)
    while pending:
        index = pending.pop()
        producer = graph.values[index].producer
        if index in decided:
            continue
        decided.add(index)
        if producer not in graph.rebuildable_ops or (graph.values[index].storable and lot.random() < share):
            stores[index] = _store(recording, index, maker, lot, lossy)
        elif producer not in replays:
            replays.add(producer)
            pending.extend(graph.ops[producer].inputs)
    policy = planner.Policy(tuple(stores))
    codecs = {i: _codec(maker, name, recording.values[i], tensors[i], lot) for i, name in _named(stores)}
    offloads = Prefetcher(HostTransfer()) if any(map(planner.is_offloaded, stores)) else None
    return Drawn(recording, policy, codecs, offloads)


def _maker(lot):
    section = {"codecs": _EVERY, "group_size": lot.choice([2, 4, 16, 128]), "scale": lot.choice(["extreme", "paper"])}
    return CodecMaker(load({"adacc": {**section, "backend": "cpu" if lot.random() < 0.3 else "reference"}}))


def _store(recording, index, maker, lot, lossy):
    value = recording.values[index]
    exact = [name for name in maker.on_offer(value, recording) if name == "bits"]
    if value.owned and value.geometry.is_dense and not value.dynamic and not value.overwritten and value.nbytes:
        exact.append(planner.OFFLOAD)
    codecs = [name for name in maker.on_offer(value, recording) if name != "bits"] if lossy else []
    store = lot.choice(codecs) if codecs and lot.random() < 0.7 else lot.choice([planner.RETAIN, *exact])
    moves = planner.is_codec(store) and planner.OFFLOAD in exact and lot.random() < 0.3
    return payload_offloaded(store) if moves else store


def _named(stores):
    return [(i, planner.on_device(store)) for i, store in enumerate(stores) if planner.is_codec(store)]


def _codec(maker, name, value, tensor, lot):
    channels = None
    if separates_outliers(name):
        order, _, _ = maker.outliers(tensor, value)
        channels = order[: lot.randint(0, min(2, len(order)))]
    return maker.make(name, tensor.device, channels)


class Oracle:
    """What the saved tensors are to come back as under a policy, by position, from the values of one recorded call."""

    def __init__(self, drawn, tensors):
        self._drawn = drawn
        self._tensors = tensors
        self._roots = {}

    def position(self, number):
        """The tensor that autograd is to get at a position; None where it is exactly what it saved."""
        position = self._drawn.recording.positions[number]
        if position.value is None or not self._is_lossy(position.value):
            return None
        return position.ref.geometry.view(self._root(position.value))

    def check_bounds(self):
        """Every codec restores each element to within its own step of the exact one."""
        for index, codec in self._drawn.codecs.items():
            value = self._drawn.recording.values[index]
            exact = flat(value).view(self._tensors[index])
            restored = codec.decompress(codec.compress(exact), exact.shape, exact.dtype)
            error = (restored.double() - exact.double()).abs()
            assert bool((error <= largest_error(codec, exact)).all()), (value.name, codec.name)

    def _is_lossy(self, index):
        drawn = self._drawn
        if drawn.policy.stores[index] is not None:
            return index in drawn.codecs and not drawn.codecs[index].lossless
        return any(self._is_lossy(i) for i in drawn.recording.ops[drawn.recording.values[index].producer].reads)

    def _root(self, index):
        if index not in self._roots:
            self._roots[index] = self._made(index)
        return self._roots[index]

    def _made(self, index):
        drawn, value = self._drawn, self._drawn.recording.values[index]
        if index in drawn.codecs:
            codec, exact = drawn.codecs[index], self._tensors[index]
            seen = flat(value).view(exact)
            restored = codec.decompress(codec.compress(seen), seen.shape, exact.dtype)
            return restored.as_strided(exact.shape, exact.stride())
        if drawn.policy.stores[index] is not None:
            return self._tensors[index]
        op = drawn.recording.ops[value.producer]
        return replay(op, self._root, drawn.recording.parameters)[value.output]


def largest_error(codec, x):
    """Half a step of the codec's grid at each element of `x` (rows, channels); a whole one where it is clipped."""
    half = 128 if codec.name.endswith("8") else 8
    if codec.form == "bits":
        return torch.zeros(())
    precision = torch.finfo(x.dtype).eps
    x = x.double()
    rounding = x.abs() * 2 * precision + 1e-6
    if codec.form == "outlier":
        x = x.index_fill(1, codec.channels, 0.0)
    if codec.form == "asymmetric":
        low, high = (_greatest(sign * x.reshape(-1), codec.group_size).reshape(x.shape) for sign in (-1, 1))
        return (low + high) / (2 * half - 1) / 2 * (1 + precision) + (low.abs() + high.abs()) * 2**-20 + rounding
    if codec.form == "channel":
        closure_of = _greatest(x.abs().t(), codec.group_size).t()
    elif codec.form == "token":
        closure_of = x.abs().amax(-1, keepdim=True)
    else:
        closure_of = _greatest(x.abs().reshape(-1), codec.group_size).reshape(x.shape)
    clipped = x.abs() > closure_of * (half - 1) / half
    return closure_of / half * torch.where(clipped, 1.0, 0.5) * (1 + precision) + rounding


def _greatest(x, size):
    """The greatest of each run of `size` along the last dimension, in the place of all its elements."""
    return torch.cat([part.amax(-1, keepdim=True).expand(part.shape) for part in x.split(size, -1)], -1)
