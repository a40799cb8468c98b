"""Have a runtime serve the blocks of an engine's model, or have the model run without ds_adacc."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_adacc import checkpointing
from ds_adacc.compact.compact import Compact
from ds_adacc.config import AdaccConfig
from ds_adacc.engine import pipeline
from ds_adacc.engine.adacc import Adacc
from ds_adacc.engine.engine_methods import patch_engine, restore_optimizer
from ds_adacc.engine.gradient_checkpointing import restore_gradient_checkpointing, take_over_gradient_checkpointing
from ds_adacc.engine.planning_ranks import planning_ranks
from ds_adacc.environment import device_name, versions
from ds_adacc.log import get_logger
from ds_adacc.plan.ranks import Ranks
from ds_adacc.profile.cache import ProfileCache
from ds_adacc.profile.cache_folder import default_path
from ds_adacc.profile.codec_maker import refuse_unusable
from ds_adacc.program.module_class import class_name
from ds_adacc.report.journal import Journal
from ds_adacc.runtime.compiled_blocks import refuse_compiled
from ds_adacc.runtime.find_blocks import find_blocks, layers_around, lone_layers
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import is_wrapped, unwrap_blocks, wrap_blocks


def blocks_to_serve(model: nn.Module, section: AdaccConfig, zero_stage: int) -> dict[str, nn.Module]:
    """The blocks that the section selects.

    Raises ConfigError for an unknown class, and for codecs that cannot run here; ValueError if a graph is compiled
    around a block.
    """
    refuse_unusable(section)
    elsewhere = pipeline.layer_classes(model) if isinstance(model, PipelineModule) else ()
    blocks = find_blocks(model, section.blocks, (nn.ModuleList, nn.Sequential, PipelineModule), elsewhere)
    refuse_compiled(model, blocks, zero_stage)
    return blocks


def serve(engine: Any, section: AdaccConfig, blocks: dict[str, nn.Module], compact: Compact | None = None) -> None:
    """Run these blocks of the engine's module as the section says. Under ZeRO-3 they must be leaf modules already.

    If a pipeline checkpoints ranges of its layers, and `blocks` in the section is "auto", these ranges are the blocks.
    """
    is_pipeline, layers_per_range = isinstance(engine, PipelineEngine), 0
    if is_pipeline and section.blocks == "auto":
        layers_per_range = pipeline.layers_checkpointed_at_once(engine.module)
    if layers_per_range:
        blocks = {}
    ranks = Ranks(planning_ranks(engine), section.solver.max_seconds)
    if compact is not None:
        # Torch's own seed, so that a seeded script has the same projections each time.
        compact.begin(engine, ranks.from_first(torch.initial_seed()))
    journal = Journal.of_this_run() if engine.global_rank == 0 else Journal(None)
    runtime = Runtime(section, ranks, has_engine=True, cache=ProfileCache(default_path()), journal=journal)
    journal.write(
        "start",
        ranks=ranks.size,
        device=device_name(engine.device),
        versions=versions(),
        model=class_name(engine.module),
        section=section.model_dump(mode="json", warnings=False),
        blocks=list(blocks),
    )
    in_training = _layers_in_training(engine)
    with ExitStack() as undo:
        undo.callback(unwrap_blocks(checkpointing.registry.own_modules(engine.module)))  # it wraps them again
        undo.callback(unwrap_blocks, blocks.values())
        wrap_blocks(blocks, runtime)
        undo.callback(checkpointing.registry.unregister, runtime)
        checkpointing.registry.register(runtime, engine.module)  # raises what the user's mpu raises
        undo.callback(vars(engine).pop, "adacc", None)  # so that another `attach` does not find it attached
        engine.adacc = Adacc(runtime, blocks, compact, engine.module)
        patch_engine(engine, is_pipeline)  # raises an error if DeepSpeed's engine has not all methods
        undo.pop_all()
    _give_back_as_now(engine, in_training)
    # Not the model: torch.compile would compile the hook too.
    runtime.agreement.budget.begin_with(engine)
    take_over_gradient_checkpointing(engine.module, blocks)
    if is_pipeline:
        pipeline.replace_checkpoint_function(engine.module)
    log = runtime.agreement.log
    log.info("%s", _summary(engine.module, blocks, layers_per_range))
    if blocks or layers_per_range:
        log.info("the first training step records and measures the blocks: it takes much longer than later steps")


def leave_alone(engine: Any) -> None:
    """Have the engine's model run without ds_adacc, whatever an earlier engine has done to it: its last engine decides.

    Layers that it shares with the model of another engine stay as they are.
    """
    model = engine.module
    restore_optimizer(engine)
    own = checkpointing.registry.own_modules(model)
    served, in_training = list(filter(is_wrapped, own)), _layers_in_training(engine)
    unwrap_blocks(served)
    _give_back_as_now(engine, in_training)
    restore_gradient_checkpointing(own)
    if isinstance(model, PipelineModule):
        pipeline.put_back_checkpoint_function(model)
    checkpointing.registry.unregister_model(model)
    if served:
        get_logger().info("%d blocks of an earlier engine run without ds_adacc from now on", len(served))


def _layers_in_training(engine: Any) -> dict[int, nn.Module]:
    """The layers that a hybrid engine gives other forwards in `eval`, by their places in its list.

    Its `train` gives them back the forwards that they had when it was made. Without those that have others now.
    """
    known = zip(getattr(engine, "_orig_modules", ()), getattr(engine, "_orig_fwds", ()), strict=True)
    return {place: module for place, (module, forward) in enumerate(known) if module.forward == forward}


def _give_back_as_now(engine: Any, in_training: dict[int, nn.Module]) -> None:
    """Have a hybrid engine give these layers back the forwards that they have now."""
    for place, module in in_training.items():
        engine._orig_fwds[place] = module.forward


def _summary(model: nn.Module, blocks: dict[str, nn.Module], layers_per_range: int) -> str:
    """What the log says of the blocks found.

    `layers_per_range`: the blocks are ranges of so many layers of a pipeline; 0: they are not.
    """
    if layers_per_range:
        return (
            f"each range of layers that the pipeline checkpoints is a block (activation_checkpoint_interval = "
            f"{layers_per_range}), if its activation_checkpoint_func calls ds_adacc.checkpointing.checkpoint"
        )
    if not blocks:
        text = (
            '0 blocks found ("auto" takes layers of one class, two or more in a list). If the model runs its blocks '
            "through ds_adacc.checkpointing, these are planned for. If it does not, list the class names of its layers "
            "in adacc.blocks"
        )
        alone = lone_layers(model)
        if alone:
            text += f". If the model runs one of these layers repeatedly, list it: {_classes(alone)}"
        return text
    names = [name or "the whole model" for name in blocks]
    found = "1 block found: " + names[0] if len(names) == 1 else f"{len(names)} blocks found: {names[0]} to {names[-1]}"
    text = f"{found} ({_classes(blocks)})"
    if "" in blocks:
        text += (
            ". A block that is the whole model saves next to nothing by recomputing: list the class names of its "
            "layers instead"
        )
    around = layers_around(model, blocks)  # with blocks inside
    if around:
        text += (
            f'. They lie within the repeated layers that "auto" takes ({_classes(around)}). What these save outside of '
            "the blocks is not planned for, and has no part in memory_budget"
        )
    return text


def _classes(modules: dict[str, nn.Module]) -> str:
    return ", ".join(sorted({class_name(module) for module in modules.values()}))
