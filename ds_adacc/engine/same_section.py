"""Refuses an engine whose ranks have unlike "adacc" sections: they would wait for each other at unlike steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ds_adacc.config import ENVIRONMENT, SECTION, AdaccConfig, ConfigError


def refuse_unlike_sections(section: AdaccConfig | None) -> None:
    """Compare this rank's section with those of all others; None: it has none. Every rank must call.

    Raises ConfigError on every rank if the section of any rank differs from that of the first.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    everyone: list[AdaccConfig | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, section)
    difference = _difference(everyone)
    if difference:
        raise ConfigError(
            f"{difference}. All ranks need the same section. If {ENVIRONMENT} gives it, set that on every machine"
        )


def _difference(everyone: Sequence[AdaccConfig | None]) -> str:
    """How the first rank's section differs from that of the first rank that has another one; "" if none has."""
    first = everyone[0]
    rank = next((rank for rank, each in enumerate(everyone) if each != first), 0)
    other = everyone[rank]
    if first is None or other is None:
        served, plain = (0, rank) if other is None else (rank, 0)
        text = f"{SECTION}: rank {served} has this section; rank {plain} has none, or one that is disabled"
        return text if rank else ""
    keys = (key for key in AdaccConfig.model_fields if getattr(first, key) != getattr(other, key))
    told = (
        f"{SECTION}.{key} = {getattr(first, key)} on rank 0, and {getattr(other, key)} on rank {rank}" for key in keys
    )
    return next(told, "")
