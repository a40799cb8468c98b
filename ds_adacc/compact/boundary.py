"""What follows an optimizer step: W ← (1 − λη) W + scale · D Pᵀ, and D ← 0, in the model and in its master copy.

λη is weight decay times learning rate. The sign of the update and the learning rate are inside D. (Shamshoum et al.,
CompAct, NAACL 2025, algorithm 3, with the weight decay of AdamW.)

* Each rank updates what it holds of W. Under ZeRO-3 that is its partition; else it is all of W, by the same numbers on
  every rank. No rank ever gathers W.
* W has no master copy. In fp32 it needs none; in bf16 and fp16 the sum is rounded stochastically.
* D is zero after every step, in the master copy too: that is what the optimizer's next step starts from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from ds_adacc.compact.linear import CompactLinear
from ds_adacc.compact.projection import lifted, tiles
from ds_adacc.compact.rounding import round_stochastically


@torch.no_grad()
def add_update(layer: CompactLinear, scale: float, decay: float, key: int) -> Tensor:
    """Add the update of the layer's proxy to its weight; `decay` is λη, `key` decides the rounding to 16 bits.

    Returns whether there was an update, bool (): false if the whole proxy is zero. Under ZeRO-3 every rank must call.
    """
    weight: Any = layer.weight  # under ZeRO-3 it has attributes that DeepSpeed has added
    with _whole(layer.compact_update) as update:
        if hasattr(weight, "ds_id"):
            part = weight.ds_tensor.data
            start = part.numel() * deepspeed.comm.get_rank(group=weight.ds_process_group)
        else:
            part, start = weight.data.view(-1), 0
        _add(part, start, update, layer, (scale, decay, key))
        return update.any()  # not read here: that would wait for the device


@torch.no_grad()
def reset(engine: Any, proxies: Sequence[Any]) -> None:
    """Set proxies to zero, and give ZeRO-3's parameters that stay gathered their new values. Every rank must call."""
    for proxy in proxies:
        proxy.data.zero_()
        for master in _masters(engine, proxy):
            master.zero_()
        if hasattr(proxy, "ds_id"):
            proxy.ds_tensor.data.zero_()
            _zero_master_of_part(proxy)
    persistent = getattr(engine.optimizer, "persistent_parameters", None)
    if persistent:  # small weights, of which ZeRO-3 keeps a whole copy on every rank
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def _zero_master_of_part(proxy: Any) -> None:
    """Set the master copy of this rank's partition to zero. A frozen proxy's too: the optimizer's moments move it."""
    zeros = torch.zeros(proxy.ds_tensor.numel(), dtype=torch.float32, device=proxy.ds_tensor.device)
    trains = proxy.requires_grad
    proxy.requires_grad_(True)  # DeepSpeed sets nothing of a frozen parameter
    deepspeed.utils.safe_set_local_fp32_param(proxy, zeros)
    proxy.requires_grad_(trains)


def _add(part: Tensor, start: int, update: Tensor, layer: CompactLinear, by: tuple[float, float, int]) -> None:
    """Update `part`, the elements of the flattened weight from `start` on. ZeRO-3 pads the last rank's part."""
    scale, decay, key = by
    outputs, features = update.shape[0], len(layer.rows)
    end = min(start + part.numel(), outputs * features)
    first, last = start // features, -(-end // features)  # the rows of the weight in the part, whole or cut
    for rows in tiles(last - first, features):
        low, high = first + rows.start, first + rows.stop
        change = lifted(update[low:high], layer.rows, layer.columns).view(-1)
        begin, stop = max(start, low * features), min(end, high * features)
        target = part[begin - start : stop - start]
        value = target.to(change.device, torch.float32, copy=True).mul_(1 - decay)
        value.add_(change[begin - low * features : stop - low * features], alpha=scale)
        if target.dtype is not torch.float32:
            value = round_stochastically(value, target.dtype, begin, key)
        target.copy_(value)


@contextmanager
def _whole(proxy: nn.Parameter) -> Iterator[Tensor]:
    """The proxy as a whole, gathered for as long as it is needed."""
    if hasattr(proxy, "ds_id"):
        with deepspeed.zero.GatheredParameters([proxy]):
            yield proxy.data
    else:
        yield proxy.data


def _masters(engine: Any, proxy: nn.Parameter) -> Iterator[Tensor]:
    """What this rank holds of the proxy's fp32 master copy, outside ZeRO-3. In fp32 without ZeRO it has none."""
    optimizer = engine.optimizer
    mapping = getattr(proxy, "_hp_mapping", None)
    if mapping is not None:  # ZeRO 1 and 2, and bf16 with gradients in fp32
        yield mapping.get_hp_fragment().data
    elif hasattr(optimizer, "fp32_groups_flat"):  # DeepSpeed's FP16_Optimizer, which serves bf16 too
        for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            parts = _unflatten_dense_tensors(flat.data, group)
            yield from (part for part, parameter in zip(parts, group, strict=True) if parameter is proxy)
    elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        for masters, group in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            yield from (m.data for m, parameter in zip(masters, group, strict=True) if parameter is proxy)
