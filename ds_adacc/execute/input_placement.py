"""DeepSpeed's `partition_activations` and `cpu_checkpointing`: other ways to retain a block's input, both lossless.

A partitioned input is held as one share on each tensor-parallel rank; with `cpu_checkpointing`, inputs wait in host
memory. Where the plan compresses an input, neither applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ds_adacc import planner
from ds_adacc.kernels import Codec
from ds_adacc.program.recording import RecordedValue, Recording

PARTITION = "partition"


class Partition(Codec):
    """Holds an equal share of the elements, in memory order, and gathers all ranks' shares to restore the tensor.

    All ranks of `group` must compress the same tensor and restore tensors in the same order, since restoring is a
    collective. The last share is padded with zeros. With `on_host` the share waits in host memory; what is restored
    is on `device`.
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

    `group`: the tensor-parallel ranks. All get the same inputs, and each holds a share; None: each rank holds all of
    them. `on_host`: inputs on a CUDA device wait in host memory.
    """

    group: dist.ProcessGroup | None = None
    on_host: bool = False

    def shared_if(self, is_agreed: bool) -> InputPlacement:
        """This placement if all ranks have agreed on shares. If not, each rank holds its inputs as a whole."""
        return self if is_agreed else replace(self, group=None)

    def refuse_alone(self, name: str, reason: str) -> None:
        """Refuse to run a call of the block `name` without ds_adacc for a `reason` that may hold on this rank only.

        Raises RuntimeError if ranks share block inputs: the others would wait in backward for this rank's share.
        """
        if self.group is not None:
            raise RuntimeError(
                f"adacc: block {name} cannot run as planned in this call: {reason}. With partition_activations the "
                "other tensor-parallel ranks may wait for this rank's share of its input. So avoid that, or set "
                "partition_activations to false"
            )

    @property
    def facts(self) -> dict[str, Any]:
        """What a saved plan depends on. The keys are the words of the message if one of these differs."""
        sharing = 1 if self.group is None else dist.get_world_size(self.group)
        return {"number of ranks that share block inputs": sharing, "cpu_checkpointing": self.on_host}

    def store(self, value: RecordedValue) -> str:
        """How to hold `value` where the policy retains it; `planner.RETAIN` for all but floating-point inputs."""
        dense = value.geometry.is_dense and not (value.overwritten or value.dynamic or value.is_parameter)
        if value.origin != "input" or not value.owned or not dense or value.geometry.dtype not in Partition.dtypes:
            return planner.RETAIN
        if self.group is not None and value.geometry.numel >= dist.get_world_size(self.group) > 1:
            return PARTITION
        return planner.OFFLOAD if self.on_host and value.device == "cuda" else planner.RETAIN

    def applied(self, planned: planner.Policy, policy: planner.Policy, recording: Recording) -> planner.Policy:
        """The policy in which the inputs that the `planned` one retains are held this way.

        `policy` is what a call can do of the planned one. It may retain more, perhaps on this rank only.
        """
        stores = list(policy.stores)
        for value, store in zip(recording.values, planned.stores, strict=True):
            if store == planner.RETAIN:
                stores[value.index] = self.store(value)
        return planner.Policy(tuple(stores))

    def codec(self, device: torch.device) -> Partition:
        """The codec of the values whose `store` is `PARTITION`, for tensors on `device`."""
        assert self.group is not None
        return Partition(self.group, device, self.on_host)

    def held_bytes(self, value: RecordedValue) -> int:
        """Bytes that a retained input, whose `store` is not `planner.RETAIN`, takes on the device."""
        if self.on_host and value.device == "cuda":
            return 0
        return self.codec(torch.device("cpu")).payload_bytes(value.geometry.size, value.geometry.dtype)


def tensor_parallel_group(mpu: Any) -> dist.ProcessGroup | None:
    """The tensor-parallel group of `mpu`, DeepSpeed's model-parallel unit: by the newer method if it has both."""
    if mpu is None:
        return None
    newer = getattr(mpu, "get_tensor_model_parallel_group", None)
    return mpu.get_model_parallel_group() if newer is None else newer()
