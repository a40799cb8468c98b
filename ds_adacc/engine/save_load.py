"""Save the state with the engine's checkpoints, and restore it when a checkpoint is loaded."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_adacc.compact import seed_file
from ds_adacc.compact.compact import applied_steps
from ds_adacc.engine import state_file
from ds_adacc.environment import device_name, versions
from ds_adacc.program.parameters import whole_shape
from ds_adacc.steps.saved_state import State
from ds_adacc.steps.step_schedule import StepSchedule

_OTHERWISE_PLANNED = ("rectifier", "solver")  # a saved plan stays valid if these keys of the section change


def save_checkpoint(engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`engine.save_checkpoint`, which also saves `engine.adacc`.

    Each rank writes its own file beside DeepSpeed's files. A run can use it if world size, device, versions, model,
    micro-batch size, section and the way to hold block inputs are the same. If one of them differs, or if the file of
    one rank is missing or damaged, all ranks make a new plan.
    """
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    tag = given.get("tag")
    if tag is None:
        tag = f"global_step{engine.global_steps}"
    if engine.adacc.compact is not None and given.get("exclude_frozen_parameters"):
        raise ValueError(
            "save_checkpoint(exclude_frozen_parameters=True) would leave out the weights that adacc.compact "
            "trains, as to DeepSpeed they are frozen; call it without exclude_frozen_parameters"
        )
    if given["save_dir"]:  # before DeepSpeed writes "latest", so that it never names a checkpoint without our file
        _save(engine, Path(given["save_dir"]) / str(tag))
    return original(*args, **kwargs)


def load_checkpoint(engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`engine.load_checkpoint`, which also restores `engine.adacc`, unless only the module is loaded.

    Raises ValueError, before anything is loaded, if the optimizer's states cannot be those of the layers that
    `compact` serves, or if DeepSpeed would load no other weights than these.
    """
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    compact = engine.adacc.compact
    if compact is not None and given.get("load_module_only") and engine.zero_optimization_stage() == 3:
        raise ValueError(
            "load_checkpoint(load_module_only=True) loads frozen weights only under ZeRO-3: those that adacc.compact "
            "trains, and no others. Load what zero_to_fp32.py makes into the model, before ds_adacc.initialize; or "
            "call it with load_optimizer_states=False"
        )
    seed = _seed(engine, given)
    result = original(*args, **kwargs)
    if result[0] is not None and compact is not None:
        compact.continue_from(compact.seed if seed is None else seed, applied_steps(engine))
    if result[0] is not None and not given.get("load_module_only"):
        _load(engine, Path(result[0]).parent)
    return result


def _seed(engine: Any, given: Mapping[str, Any]) -> int | None:
    """The seed of the saved projections; None if there is none, or if the optimizer's states are not loaded."""
    if given.get("load_module_only") or not given.get("load_optimizer_states", True):
        return None
    folder, tag = Path(given["load_dir"]), given.get("tag")
    latest = folder / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    if tag is None or not (folder / str(tag)).is_dir():
        return None  # DeepSpeed says what is missing
    return seed_file.read(engine.adacc.compact, folder / str(tag))  # on every rank, as DeepSpeed's own files


def _save(engine: Any, folder: Path) -> None:
    """Write this rank's file into the checkpoint's folder. If the disk fails, log an error; the run continues.

    Without the file of `compact` a run could not be resumed: then the OSError is raised.
    """
    engine.adacc.controller.state_is_saved()
    if engine.adacc.compact is not None and engine.global_rank == 0:
        seed_file.write(engine.adacc.compact, folder)
    try:
        state_file.write(folder / _name(engine), _facts(engine), engine.adacc.runtime.state())
    except OSError as error:
        engine.adacc.controller.agreement.log.error(
            "the plan could not be saved in %s. A run resumed from there makes a new one: %s", folder, error
        )


def _load(engine: Any, folder: Path) -> None:
    """Continue from the files in the checkpoint's folder, or from the start. Every rank must call."""
    ranks = engine.adacc.controller.ranks
    state, reason = _read(engine, folder / _name(engine))
    reasons = [each for each in ranks.gather(reason) if each]
    new = State(schedule=StepSchedule(ended=engine.global_steps))  # without a plan; counts its steps as the engine does
    engine.adacc.runtime.restore(new if reasons else state)
    if not ranks.is_first:
        return
    if reasons:
        engine.adacc.controller.agreement.log.warning("a new plan is made: %s", reasons[0])
    elif state.plan is not None:
        engine.adacc.controller.agreement.log.info(
            "the plan of the checkpoint %s is restored; it takes effect at the input sizes that it is for", folder
        )


def _name(engine: Any) -> str:
    return f"adacc_rank_{engine.global_rank:05d}.pt"


def _read(engine: Any, path: Path) -> tuple[State, str]:
    """The state, and the reason why it cannot be used, or ""."""
    if not path.exists():
        return State(), f"the checkpoint has no file {path}"
    try:
        path.open("rb").close()
    except OSError as error:
        return State(), f"{path} cannot be read: {error}"
    facts = _facts(engine)
    try:
        document = state_file.read(path)
        reason = _difference(document, facts)
        return (State(), reason) if reason else (state_file.parse(document), "")
    except Exception as error:  # a damaged file may raise any exception; the run must resume all the same
        # Not its text: torch would advise to load the file unsafely.
        return State(), f"{path} is damaged, or something else wrote it ({type(error).__name__})"


def _facts(engine: Any) -> dict[str, Any]:
    """The facts that must be the same for a saved plan to be valid. The keys are the names used in log messages."""
    adacc = engine.adacc
    section = adacc.config.model_dump(mode="json", exclude=set(_OTHERWISE_PLANNED), warnings=False)
    section["memory_budget"] = str(adacc.config.memory_budget)
    return {
        "world size": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "number of ranks that plan together": adacc.controller.ranks.size,
        "device": device_name(engine.device),
        **{f"version of {name}": version for name, version in versions().items()},
        "model": _fingerprint(engine.module),
        "micro-batch size": engine.train_micro_batch_size_per_gpu(),
        **adacc.runtime.agreement.inputs.facts,
        **{f"adacc.{key}": value for key, value in section.items()},
        "step": engine.global_steps,
    }


def _difference(document: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """A message about the first fact that differs from the checkpoint, or ""."""
    if document["format"] != state_file.FORMAT:
        by = "another version of ds_adacc saved the checkpoint's plan"
        return f"{by}, in format {document['format']}; this one reads format {state_file.FORMAT}"
    saved = document["facts"]
    names = (name for name in {**facts, **saved} if saved.get(name) != facts.get(name))
    return next((f"the checkpoint's {name} was {saved.get(name)} and is {facts.get(name)}" for name in names), "")


def _fingerprint(model: nn.Module) -> str:
    """The name of the model's class, and a hash of the names, whole shapes and dtypes of its parameters."""
    parameters = [(name, whole_shape(p), str(p.dtype)) for name, p in model.named_parameters()]
    return f"{type(model).__name__} {hashlib.sha256(repr(parameters).encode()).hexdigest()[:12]}"
