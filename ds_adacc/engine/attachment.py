"""Put ds_adacc to work in an engine that `deepspeed.initialize` has made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_adacc.config import AdaccConfig, ConfigError, load, read
from ds_adacc.engine.api import Adacc, blocks_to_serve, serve


def attach(engine: Any, config: Any = None) -> Adacc | None:
    """Do for this engine what `ds_adacc.initialize` would have done, and return its `engine.adacc`.

    `config` is the ds_config (a dict, or the path of a JSON file) whose "adacc" section counts; by default the engine's
    own. None is returned, and nothing done, if the section says `"enabled": false`. An engine that is served already
    stays as it is. To be called on every rank, between optimizer steps, and before `engine.load_checkpoint`, which
    restores the plan only of an engine that is served.

    Raises TypeError for what is no engine; ConfigError if there is no section, if it is bad, or if it is another one
    than that by which the engine is served; ValueError for a model that is compiled around its blocks; RuntimeError in
    the midst of gradient accumulation.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"attach takes what deepspeed.initialize returns first, an engine, not {type(engine).__name__}")
    section = _section(engine.config if config is None else config)
    served: Adacc | None = getattr(engine, "adacc", None)
    if served is not None:
        if section != served.config:
            raise ConfigError("adacc: this engine is served already, by another section; attach once, or with that one")
        return served
    if section is None:
        return None
    pending = engine.micro_steps % engine.gradient_accumulation_steps()
    if pending:
        steps = engine.gradient_accumulation_steps()
        raise RuntimeError(f"attach between optimizer steps: {pending} of a step's {steps} micro-batches have run")
    stage = engine.zero_optimization_stage()
    blocks = blocks_to_serve(engine.module, section, stage)
    if blocks and stage == 3:
        _make_leaves(engine, blocks)
    serve(engine, section, blocks)
    return engine.adacc


def _section(source: Any) -> AdaccConfig | None:
    section = load(source)
    if section is None and "adacc" not in read(source):
        raise ConfigError("adacc: the config has no such section; add it, or pass config=, a ds_config that has it")
    return section


def _make_leaves(engine: DeepSpeedEngine, blocks: Mapping[str, nn.Module]) -> None:
    """Have ZeRO-3 gather each block's parameters together.

    Its hooks are in place by then: they are taken away and set anew, as DeepSpeed's own `unwrap_model_for_generation`
    does. Gradients are still reduced parameter by parameter.
    """
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    for block in blocks.values():
        deepspeed.utils.set_z3_leaf_module(block, True)
    offload._register_deepspeed_module(offload.module)
