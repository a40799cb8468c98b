"""Enable ds_adacc in a DeepSpeed engine: `initialize` makes a new engine, `attach` uses an existing one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed import initialize as deepspeed_initialize
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_adacc import checkpointing
from ds_adacc.compact.compact import Compact, convert, refuse_served
from ds_adacc.compact.optimized import groups_of
from ds_adacc.config import SECTION, AdaccConfig, ConfigError, misplaced, read, section_of
from ds_adacc.engine.adacc import Adacc
from ds_adacc.engine.planning_ranks import refuse_unlike_sections
from ds_adacc.engine.serving import blocks_to_serve, leave_alone, serve
from ds_adacc.engine.zero3 import make_late_leaves, make_leaves, mixtures
from ds_adacc.log import get_logger


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize`, and enable ds_adacc as the "adacc" section of the config says.

    The arguments and return values are those of `deepspeed.initialize`. Without the section, or with
    `"enabled": false`, this only calls `deepspeed.initialize`. Of several engines of one model, the last one decides
    how its blocks run: ds_adacc no longer serves it for an earlier engine.

    Raises ConfigError for a bad section, for one that differs from another rank's, and if the engine is to train layers
    that an earlier engine's CompAct has changed; ValueError if torch.compile has compiled a module around the blocks
    or, under ZeRO-3, a block, and for an optimizer that CompAct cannot use. All are raised before anything is set up,
    but for unlike sections and such an optimizer. Whatever is raised, ds_adacc leaves the layers of the model and the
    optimizer's parameter groups as they were.
    """
    checkpointing.registry.has_started = True  # whatever the section says
    given = (config, config_params, getattr(args, "deepspeed_config", None))  # deepspeed.initialize takes the first
    ds_config = read(next((each for each in given if each is not None), None))
    section = section_of(ds_config)
    if model is not None and (optimizer is not None or ds_config.get("optimizer")):
        refuse_served(model)
    prepared = None
    with ExitStack() as undo:  # all that is done to the model before something is raised
        if section is not None and model is not None:
            prepared = _prepare(model, section, ds_config, (model_parameters, optimizer), undo)
        result = deepspeed_initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters if prepared is None else prepared.model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=config,
            mesh_param=mesh_param,
            config_params=config_params,
        )
        refuse_unlike_sections(result[0], section)
        if section is not None and prepared is not None:
            if prepared.blocks and prepared.stage == 3:
                undo.callback(make_late_leaves(result[0], prepared.blocks))
            serve(result[0], section, prepared.blocks, prepared.compact)
        undo.pop_all()
    if section is None and model is not None:
        leave_alone(result[0])
    if SECTION not in ds_config and (keys := misplaced(ds_config)):
        text = 'ds_config has no "%s" section: ds_adacc does nothing. Put these keys into one: %s'
        get_logger().warning(text, SECTION, ", ".join(keys))
    elif SECTION not in ds_config:
        get_logger().info('ds_config has no "%s" section: ds_adacc does nothing', SECTION)
    elif section is None:
        checkpointing.turn_off()
    return result


def attach(engine: Any, config: Any = None) -> Adacc | None:
    """Enable ds_adacc in an existing engine, as `ds_adacc.initialize` does, and return its `engine.adacc`.

    `config` is the ds_config (a dict, or the path of a JSON file) with the "adacc" section; the default is the engine's
    own. If the section says `"enabled": false`, this returns None, and the model runs without ds_adacc, whatever an
    earlier engine of it did. If ds_adacc is attached to the engine already, the engine stays as it is. Call this on
    every rank, between two optimizer steps. Call it before `engine.load_checkpoint`, which restores the plan only if
    ds_adacc is attached.

    Raises TypeError if `engine` is not an engine; ConfigError if there is no section, if it is bad, if it differs from
    that of another rank or from the section that is attached already, or if the engine trains layers that an earlier
    engine's CompAct has changed; ValueError if the model is compiled around its blocks, or its blocks under ZeRO-3;
    RuntimeError if gradient accumulation is not at a step boundary.
    """
    checkpointing.registry.has_started = True  # whatever the section says
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            "attach needs a DeepSpeed engine: what deepspeed.initialize returns first, or accelerate's prepare if it "
            f"trains with DeepSpeed; not {type(engine).__name__}"
        )
    ds_config = read(engine.config if config is None else config)
    section = section_of(ds_config)
    if SECTION not in ds_config:
        raise ConfigError(
            'adacc: the config has no such section; add it, or pass a ds_config that has it, as config={"adacc": {...}}'
        )
    served: Adacc | None = getattr(engine, "adacc", None)
    if served is not None:
        _refuse_another(section, served.config)
        return served
    refuse_unlike_sections(engine, section)
    if section is not None and section.compact is not None:
        raise ConfigError(
            "adacc.compact: it changes what the optimizer trains, so that an existing engine cannot take it up; call "
            "ds_adacc.initialize in place of deepspeed.initialize"
        )
    if engine.basic_optimizer is not None:
        refuse_served(engine.module)
    if section is None:
        leave_alone(engine)
        checkpointing.turn_off()
        return None
    _refuse_within_step(engine)
    stage = engine.zero_optimization_stage()
    blocks = blocks_to_serve(engine.module, section, stage)
    checkpointing.log_options(ds_config)
    with ExitStack() as undo:
        if blocks and stage == 3:
            undo.callback(make_late_leaves(engine, blocks))
        serve(engine, section, blocks)
        undo.pop_all()
    return engine.adacc


class _Prepared(NamedTuple):
    """What was done to a model before DeepSpeed makes its engine. `stage`: that of ZeRO.

    `model_parameters`: what the optimizer is to train, which CompAct changes.
    """

    blocks: dict[str, nn.Module]
    stage: int
    compact: Compact | None
    model_parameters: Any


def _prepare(
    model: nn.Module, section: AdaccConfig, ds_config: Mapping[str, Any], trained: tuple[Any, Any], undo: ExitStack
) -> _Prepared:
    """Find the blocks, and change in the model what must be changed before the engine is made. `undo` takes it back.

    `trained`: the parameters and the optimizer that DeepSpeed is to be given.
    """
    stage, (model_parameters, optimizer), compact = _zero_stage(ds_config), trained, None
    if section.compact is not None:
        _refuse_compact(ds_config, model)
    blocks = blocks_to_serve(model, section, stage)
    checkpointing.log_options(ds_config)
    if section.compact is not None:
        groups = groups_of(model, model_parameters, optimizer)
        compact = convert(model, blocks, section.compact, groups)
        undo.callback(compact.undo)
        if not isinstance(optimizer, torch.optim.Optimizer):  # its own groups have changed
            model_parameters = groups
    if blocks and stage == 3:
        undo.callback(make_leaves(mixtures(model, blocks.values(), ds_config)))
    return _Prepared(blocks, stage, compact, model_parameters)


def _refuse_another(section: AdaccConfig | None, in_force: AdaccConfig) -> None:
    if section == in_force:
        return
    if section is None:
        raise ConfigError(
            "adacc.enabled = False: this engine runs with ds_adacc already; to train without it, make another engine "
            "of the model with this section"
        )
    how = "; ".join(f"{key} is {its} there, {own} here" for key, own, its in section.differences(in_force))
    raise ConfigError(
        f"adacc: this engine already runs with another section ({how}); attach once, or with the same section"
    )


def _refuse_within_step(engine: Any) -> None:
    steps = engine.gradient_accumulation_steps()
    if pending := engine.micro_steps % steps:
        raise RuntimeError(
            f"attach between optimizer steps: {pending} of this step's {steps} micro-batches have already run"
        )


def _refuse_compact(ds_config: Mapping[str, Any], model: nn.Module) -> None:
    """Raises ConfigError for what CompAct is not made for: it reads frozen weights whole, or as ZeRO-3's shares."""
    zero = ds_config.get("zero_optimization", {})
    wrong = {
        "a PipelineModule": isinstance(model, PipelineModule),
        "zero_optimization.offload_param.device = 'nvme'": (zero.get("offload_param") or {}).get("device") == "nvme",
        "zero_optimization.zero_hpz_partition_size above 1": zero.get("zero_hpz_partition_size", 1) > 1,
        "zero_optimization.zero_quantized_nontrainable_weights": bool(zero.get("zero_quantized_nontrainable_weights")),
        "zero_optimization.mics_shard_size": zero.get("mics_shard_size", -1) > 0,
        "zero_optimization.zenflow": bool(zero.get("zenflow")),
    }
    for what, is_there in wrong.items():
        if is_there:
            raise ConfigError(f"adacc.compact does not work with {what}; remove one of the two")


def _zero_stage(ds_config: Mapping[str, Any]) -> int:
    section = ds_config.get("zero_optimization", {})
    stage = section.get("stage", 0) if isinstance(section, Mapping) else None
    if stage not in (0, 1, 2, 3):
        shown = section if stage is None else stage
        raise ConfigError(f"zero_optimization = {shown!r}: must be an object whose stage is 0, 1, 2 or 3")
    return stage
