"""Attach ds_adacc to a DeepSpeed engine: wrapped blocks, ZeRO-3 leaf modules, and the rectifier in `engine.step`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed import initialize as deepspeed_initialize
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from ds_adacc import checkpointing
from ds_adacc.config import AdaccConfig, ConfigError, load, read
from ds_adacc.engine import pipeline
from ds_adacc.engine.checkpoint import Checkpoints
from ds_adacc.engine.checkpoint_file import State
from ds_adacc.engine.gradient_checkpointing import take_over
from ds_adacc.engine.zero3 import make_leaves
from ds_adacc.environment import device_name, versions
from ds_adacc.log import get_logger
from ds_adacc.plan.ranks import Ranks
from ds_adacc.profile import cache
from ds_adacc.rectify.rectifier import Rectifier
from ds_adacc.report.journal import Journal
from ds_adacc.report.monitor import events
from ds_adacc.runtime.compiled import compile_blocks, refuse
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import find_blocks, unwrap_blocks, wrap_blocks


class Adacc:
    """What `engine.adacc` is: the section in force, the runtime at work, and what it did.

    `observed_held_bytes` are the bytes that the blocks' saved tensors took when backward began, in the first step under
    the plan in force, and `planned_held_bytes` what they were to take; None before that step has ended.
    """

    def __init__(self, config: AdaccConfig, runtime: Runtime, found: Sequence[str] = ()) -> None:
        self.config = config
        self.runtime = runtime
        self._found = found
        self.rectifier = Rectifier(config.rectifier, runtime) if config.rectifier.enabled else None
        self._log = get_logger()
        self._served = False
        self._warned = False

    def _warn_of_no_calls(self) -> None:
        if self._warned:
            return
        self._warned = True
        if self._found:
            text = "none of the %d blocks found (the first: %s) has run in training; name the classes of those that do"
            self._log.warning(
                f"adacc is enabled but does nothing: {text} in adacc.blocks", len(self._found), self._found[0]
            )
        else:
            self._log.warning(
                "adacc is enabled but does nothing: adacc.blocks matched no block of the model, and the model ran none "
                "through ds_adacc.checkpointing; name the blocks' classes in adacc.blocks"
            )

    @property
    def planned_held_bytes(self) -> int | None:
        return self.runtime.held and self.runtime.held.planned

    @property
    def observed_held_bytes(self) -> int | None:
        return self.runtime.held and self.runtime.held.observed

    def state(self) -> State:
        """What a checkpoint keeps, between two steps."""
        rectifier = self.rectifier.state() if self.rectifier is not None else None
        generator = self.runtime.codecs.generator
        return State(self.runtime.state(), rectifier, self.runtime.blocks.to_plain(), generator.get_state())

    def restore(self, state: State) -> None:
        """Go on from there; `State()`: from the start. Every rank must call, with states of the same step."""
        self.runtime.restore(state.runtime, state.blocks)
        if self.rectifier is not None:
            self.rectifier.restore(state.rectifier)
        if state.seeds is not None:
            self.runtime.codecs.generator.set_state(state.seeds)

    def end_step(self) -> None:
        """An optimizer step has ended: plan for what is new, report, track. Every rank must call."""
        runtime = self.runtime
        runtime.end_backward()
        self._served = self._served or runtime.ranks.any(runtime.calls > 0)
        if not self._served:
            self._warn_of_no_calls()
            return
        runtime.end_step()
        if self.rectifier is not None:
            self.rectifier.end_step()


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
    """`deepspeed.initialize`, and the "adacc" section of its config put to work.

    Same arguments and return values. Without the section, or with `"enabled": false`, it is `deepspeed.initialize`.
    Raises ConfigError for a bad section, and ValueError for a model that is compiled around its blocks, before anything
    is set up.
    """
    start = functools.partial(
        deepspeed_initialize,
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
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
    source = _config_source(args, config, config_params)
    section = load(source)
    if section is None or model is None:
        return start()
    stage = _zero_stage(source)
    blocks = blocks_to_serve(model, section, stage)
    if stage == 3:
        make_leaves(blocks.values())
    result = start()
    serve(result[0], section, blocks)
    return result


def blocks_to_serve(model: nn.Module, section: AdaccConfig, zero_stage: int) -> dict[str, nn.Module]:
    """The blocks that the section names. Raises ConfigError for an unknown class, ValueError for a graph around one."""
    elsewhere = pipeline.layer_classes(model) if isinstance(model, PipelineModule) else ()
    blocks = find_blocks(model, section.blocks, (nn.ModuleList, nn.Sequential, PipelineModule), elsewhere)
    refuse(model, blocks, zero_stage)
    return blocks


def serve(engine: Any, section: AdaccConfig, blocks: dict[str, nn.Module]) -> None:
    """Run these blocks of the engine's module as the section says; under ZeRO-3 they are leaf modules already.

    A pipeline that checkpoints ranges of its layers by itself has those served instead.
    """
    is_pipeline = isinstance(engine, PipelineEngine)
    if is_pipeline and pipeline.take_over(engine.module, checkpointing.checkpoint) and section.blocks == "auto":
        blocks = {}
    ranks = _planning_ranks(engine)
    journal = Journal.of_this_run() if engine.global_rank == 0 else Journal(None)
    runtime = Runtime(section, ranks, stepped=True, store=cache.open_default(), journal=journal)
    runtime.journal.write(
        "start",
        ranks=ranks.size,
        device=device_name(engine.device),
        versions=versions(),
        section=section.model_dump(mode="json", warnings=False),
        blocks=list(blocks),
    )
    wrap_blocks(blocks, runtime)
    checkpointing.use(runtime)
    engine.adacc = Adacc(section, runtime, list(blocks))
    if is_pipeline:
        engine.train_batch = _then(_then_if_stepped(engine, engine.train_batch), _nothing, runtime.abandon)
    else:
        engine.backward = _then(engine.backward, runtime.end_backward, runtime.abandon)
        engine.step = _then_if_stepped(engine, engine.step)
    engine.compile = _blocks_first(engine, blocks, runtime)
    Checkpoints(engine, section).attach()
    get_logger().info("%d blocks found: %s", len(blocks), _summary(blocks))
    take_over(engine.module, blocks)


def _planning_ranks(engine: Any) -> Ranks:
    """Those that pass step boundaries together and run one policy.

    All of them: shards of a tensor or of the data need the same collectives in the same order. The stages of a pipeline
    each plan for themselves: they run other layers, and hold other numbers of micro-batches.
    """
    if not dist.is_initialized():
        return Ranks()
    return Ranks(pipeline.stage_ranks(engine) if isinstance(engine, PipelineEngine) else dist.group.WORLD)


def _then(original: Callable[..., Any], after: Callable[[], None], failed: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def both(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException:
            failed()
            raise
        after()
        return result

    return both


def _then_if_stepped(engine: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, and the end of the step if it takes one: `engine.step` does not in the midst of accumulation."""

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        result = original(*args, **kwargs)
        if engine.global_steps != before:
            engine.adacc.end_step()
            if engine.monitor.enabled:
                engine.monitor.write_events(events(engine.adacc, engine.global_samples))
        return result

    return step


def _blocks_first(engine: Any, blocks: dict[str, nn.Module], runtime: Runtime) -> Callable[..., None]:
    """`engine.compile`, which is to compile every block by itself, inside its hooks, and then what is around them."""
    original = engine.compile

    @functools.wraps(original)
    def compile(*args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        if engine.is_deepcompile_enabled() or given.arguments["compiled_autograd_enabled"]:
            raise ValueError(
                "adacc: engine.compile() with compile.deepcompile or compiled_autograd_enabled takes over the backward "
                "of the blocks; turn that off, or adacc"
            )
        if not engine.is_compiled:
            unwrap_blocks(blocks)
            try:
                compile_blocks(blocks, given.arguments["backend"], given.arguments["compile_kwargs"])
            finally:
                wrap_blocks(blocks, runtime)
        original(*args, **kwargs)

    return compile


def _nothing() -> None:
    pass


def _summary(blocks: dict[str, nn.Module]) -> str:
    if not blocks:
        return "none; blocks that the model itself runs through ds_adacc.checkpointing will be served"
    names = list(blocks)
    classes = sorted({type(block).__name__ for block in blocks.values()})
    return f"{names[0]} to {names[-1]} ({', '.join(classes)})"


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    """Where deepspeed.initialize would take its config from."""
    for candidate in (config, config_params, getattr(args, "deepspeed_config", None)):
        if candidate is not None:
            return candidate
    return None


def _zero_stage(source: Any) -> int:
    section = read(source).get("zero_optimization", {})
    stage = section.get("stage", 0) if isinstance(section, Mapping) else None
    if stage not in (0, 1, 2, 3):
        shown = section if stage is None else stage
        raise ConfigError(f"zero_optimization = {shown!r}: must be an object whose stage is 0, 1, 2 or 3")
    return stage
