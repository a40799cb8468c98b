"""The ranks that plan together. With unlike "adacc" sections they would wait for each other, so these are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_adacc.config import ENVIRONMENT, SECTION, AdaccConfig, ConfigError


def planning_ranks(engine: Any) -> Sequence[int]:
    """The ranks that plan together and run the same policies. Without torch.distributed there are none.

    These are all ranks, because shards of a tensor or of the data need the same collectives in the same order. In a
    pipeline each stage plans alone: stages run different layers, and hold different numbers of micro-batches.
    """
    if not dist.is_initialized():
        return ()
    if isinstance(engine, PipelineEngine):
        return engine.module.topology().filter_match(pipe=engine.stage_id)
    return range(dist.get_world_size())


def refuse_unlike_sections(engine: Any, section: AdaccConfig | None) -> None:
    """Compare this rank's section with those of the ranks that it plans with; None: it has none.

    Every rank that has made the engine must call. An `mpu` may say that not all have: then nothing is compared, as
    the others would be waited for.

    Raises ConfigError on each of these ranks if the section of any differs from that of the first.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or not _is_of_all_ranks(engine):
        return
    everyone: list[AdaccConfig | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, section)
    difference = _difference({rank: everyone[rank] for rank in planning_ranks(engine)})
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
    key, own, its = section.differences(other)[0]
    return f"{SECTION}.{key} = {own} on rank {first}, and {its} on rank {rank}"
