"""Refuses an engine whose ranks have unlike "adacc" sections: they would wait for each other at unlike steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_adacc.config import ENVIRONMENT, SECTION, AdaccConfig, ConfigError
from ds_adacc.engine import pipeline


def refuse_unlike_sections(engine: Any, section: AdaccConfig | None) -> None:
    """Compare this rank's section with those of all others, in a pipeline of its stage; None: it has none.

    Every rank that has made the engine must call. An `mpu` may say that not all have: then nothing is compared, as
    the others would be waited for.

    Raises ConfigError on each of these ranks if the section of any differs from that of the first.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or not _is_of_all_ranks(engine):
        return
    everyone: list[AdaccConfig | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, section)
    ranks = pipeline.stage_ranks(engine) if isinstance(engine, PipelineEngine) else range(len(everyone))
    difference = _difference({rank: everyone[rank] for rank in ranks})
    if difference:
        raise ConfigError(
            f"{difference}. Both ranks need the same section. If {ENVIRONMENT} gives it, set that on every machine"
        )


def _is_of_all_ranks(engine: Any) -> bool:
    """Whether every rank has made the engine. Without an `mpu` DeepSpeed needs them all."""
    if engine.mpu is None or isinstance(engine, PipelineEngine):
        return True
    return engine.seq_dp_world_size * engine.mp_world_size == dist.get_world_size()


def _difference(sections: Mapping[int, AdaccConfig | None]) -> str:
    """How the first rank's section differs from that of the first rank that has another one; "" if none has."""
    first, section = next(iter(sections.items()))
    rank, other = next(((rank, each) for rank, each in sections.items() if each != section), (first, section))
    if rank == first:
        return ""
    if section is None or other is None:
        served, plain = (first, rank) if other is None else (rank, first)
        return f"{SECTION}: rank {served} has this section; rank {plain} has none, or one that is disabled"
    key = next(key for key in AdaccConfig.model_fields if getattr(section, key) != getattr(other, key))
    return f"{SECTION}.{key} = {getattr(section, key)} on rank {first}, and {getattr(other, key)} on rank {rank}"
