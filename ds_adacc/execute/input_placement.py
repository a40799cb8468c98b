"""Block inputs held otherwise than whole and on the device: a share on each tensor-parallel rank, or in host memory.

DeepSpeed's `partition_activations` and `cpu_checkpointing`. Both are lossless, and stand in for retaining an input;
where the plan compresses it, the payload stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ds_adacc import planner
from ds_adacc.kernels import Codec
from ds_adacc.plan.correction import Correction
from ds_adacc.record.recording import RecordedValue, Recording

PARTITION = "partition"


class Partition(Codec):
    """Holds an equal share of the elements, as they lie in memory, and gathers all shares to restore them.

    Every rank of `group` must compress the same tensor, and restore its tensors in the same order. The last share is
    filled up with zeros. With `on_host` the share waits in host memory; what is restored lies on `device`.
    """

    form = PARTITION
    lossless = True
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

    def __init__(self, group: dist.ProcessGroup, device: torch.device, on_host: bool) -> None:
        self._group = group
        self._device = device
        self._on_host = on_host

    def payload_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return self._share(torch.Size(shape).numel()) * dtype.itemsize

    def workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return self.payload_bytes(shape, dtype)

    def _compress(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        count = self._share(x.numel())
        share = x.new_zeros(count)
        mine = x.reshape(-1)[count * dist.get_rank(self._group) :][:count]
        share[: mine.numel()] = mine
        return (share.cpu() if self._on_host else share,)

    def _decompress(self, payload: tuple[torch.Tensor, ...], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        share = payload[0].to(self._device)
        whole = share.new_empty(share.numel() * dist.get_world_size(self._group))
        # as bytes: no backend knows all dtypes
        dist.all_gather_into_tensor(whole.view(torch.uint8), share.view(torch.uint8), group=self._group)
        return whole[: torch.Size(shape).numel()].view(*shape)

    def _share(self, numel: int) -> int:
        return -(-numel // dist.get_world_size(self._group))


@dataclass(frozen=True)
class InputPlacement:
    """How the inputs are held that a policy retains.

    `group`: the tensor-parallel ranks, which are all given the same inputs and hold a share each; None: each rank
    holds the whole. `on_host`: what lies on a CUDA device waits in host memory.
    """

    group: dist.ProcessGroup | None = None
    on_host: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """Under which a plan for inputs held so is of use, by the words in which a difference is told."""
        sharing = 1 if self.group is None else dist.get_world_size(self.group)
        return {"number of ranks that share block inputs": sharing, "cpu_checkpointing": self.on_host}

    def store(self, value: RecordedValue) -> str:
        """What stands in for retaining `value`; `planner.RETAIN` itself for all but floating-point inputs."""
        dense = value.geometry.is_dense and not (value.overwritten or value.dynamic or value.is_parameter)
        if value.origin != "input" or not value.owned or not dense or value.geometry.dtype not in Partition.dtypes:
            return planner.RETAIN
        if self.group is not None and value.geometry.numel >= dist.get_world_size(self.group) > 1:
            return PARTITION
        return planner.OFFLOAD if self.on_host and value.device == "cuda" else planner.RETAIN

    def applied(self, policy: planner.Policy, recording: Recording) -> planner.Policy:
        """The policy with inputs held so that it retains."""
        pairs = zip(policy.stores, recording.values, strict=True)
        stores = (self.store(value) if store == planner.RETAIN else store for store, value in pairs)
        return planner.Policy(tuple(stores), policy.replays)

    def codec(self, device: torch.device) -> Partition:
        """For the values whose `store` is `PARTITION`, on `device`."""
        assert self.group is not None
        return Partition(self.group, device, self.on_host)

    def counted(self, profile: planner.Profile, recording: Recording) -> planner.Profile:
        """The profile in which a retained input counts with what is held of it.

        The whole of it then counts besides in forward, where it is an argument, and throughout the call's backward,
        somewhere in which it is restored.
        """
        values, forward, backward = list(profile.graph.values), 0, 0
        for value in recording.values:
            if self.store(value) != planner.RETAIN:
                held = self._held_bytes(value)
                values[value.index] = replace(values[value.index], nbytes=held)
                forward += value.nbytes - held
                backward += value.nbytes
        if not backward:
            return profile
        counted = replace(profile, graph=replace(profile.graph, values=tuple(values)))
        return Correction(forward, backward).of(counted)

    def _held_bytes(self, value: RecordedValue) -> int:
        if self.on_host and value.device == "cuda":
            return 0
        return self.codec(torch.device("cpu")).payload_bytes(value.geometry.size, value.geometry.dtype)


def tensor_parallel_group(mpu: Any) -> dist.ProcessGroup | None:
    """The group of `mpu`, DeepSpeed's model-parallel unit, by the newer of its names if it has both."""
    if mpu is None:
        return None
    newer = getattr(mpu, "get_tensor_model_parallel_group", None)
    return mpu.get_model_parallel_group() if newer is None else newer()
