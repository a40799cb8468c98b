"""Save the state with the engine's checkpoints, and go on from it where they are loaded."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_adacc.config import AdaccConfig
from ds_adacc.engine import checkpoint_file as states
from ds_adacc.engine.checkpoint_file import State
from ds_adacc.environment import device_name, versions
from ds_adacc.log import get_logger

_OTHERWISE_PLANNED = ("rectifier", "solver")  # a plan stands whatever these keys of the section say


class Checkpoints:
    """`save_checkpoint` and `load_checkpoint` of an engine, which then also save and restore `engine.adacc`.

    Each rank has a file of its own beside DeepSpeed's. It is of use to a run of the same world size, device, versions,
    model, micro-batch, section and way to hold block inputs; to any other, or if it is missing or damaged on one rank,
    all ranks plan anew.
    """

    def __init__(self, engine: Any, section: AdaccConfig) -> None:
        self._engine = engine
        self._section = section

    def attach(self) -> None:
        """Have the engine's two methods do so."""
        self._engine.save_checkpoint = self._saving(self._engine.save_checkpoint)
        self._engine.load_checkpoint = self._loading(self._engine.load_checkpoint)

    def save(self, folder: Path) -> None:
        """Write this rank's file into the checkpoint's folder. A disk that fails is a warning: the run goes on."""
        adacc = self._engine.adacc
        adacc.runtime.rest()
        try:
            states.write(folder / self._name, self._facts(), adacc.state())
        except OSError as error:
            get_logger().error("a run resumed from %s will have its plan made anew: %s", folder, error)

    def load(self, folder: Path) -> None:
        """Go on from the files in the checkpoint's folder, or from the start. Every rank must call."""
        adacc = self._engine.adacc
        state, reason = self._read(folder / self._name)
        reasons = [told for told in adacc.runtime.ranks.gather(reason) if told]
        adacc.restore(State() if reasons else state)
        if not adacc.runtime.ranks.is_first:
            return
        if reasons:
            get_logger().warning("the plan is made anew: %s", reasons[0])
        elif state.runtime.plan is not None:
            get_logger().info("the plan of the checkpoint %s is in force again", folder)

    @property
    def _name(self) -> str:
        return f"adacc_rank_{self._engine.global_rank:05d}.pt"

    def _read(self, path: Path) -> tuple[State, str]:
        """The state, and what keeps it from being of use, or ""."""
        if not path.exists():
            return State(), f"the checkpoint holds none in {path}"
        try:
            document = states.read(path)
            reason = _difference(document, self._facts())
            return (State(), reason) if reason else (states.parse(document), "")
        except Exception as error:  # a damaged file may raise anything, and is no reason not to resume
            return State(), f"{path} is damaged ({type(error).__name__})"

    def _facts(self) -> dict[str, Any]:
        """What must be the same for the plan to hold, by the words in which a difference is told."""
        section = self._section.model_dump(mode="json", exclude=set(_OTHERWISE_PLANNED), warnings=False)
        return {
            "world size": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
            "number of ranks that plan together": self._engine.adacc.runtime.ranks.size,
            "device": device_name(self._engine.device),
            **{f"version of {name}": version for name, version in versions().items()},
            "model": _fingerprint(self._engine.module),
            "micro-batch size": self._engine.train_micro_batch_size_per_gpu(),
            **self._engine.adacc.runtime.coordinator.inputs.facts,
            **{f"adacc.{key}": value for key, value in section.items()},
            "step": self._engine.global_steps,
        }

    def _saving(self, original: Any) -> Any:
        @functools.wraps(original)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            tag = given.get("tag")
            if tag is None:
                tag = f"global_step{self._engine.global_steps}"
            if given["save_dir"]:  # first, so that "latest" never names a checkpoint without it
                self.save(Path(given["save_dir"]) / str(tag))
            return original(*args, **kwargs)

        return save_checkpoint

    def _loading(self, original: Any) -> Any:
        @functools.wraps(original)
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            if result[0] is not None and not given.get("load_module_only"):
                self.load(Path(result[0]).parent)
            return result

        return load_checkpoint


def _difference(document: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The first of the facts that the checkpoint was saved under and that no longer holds."""
    if document["format"] != states.FORMAT:
        return f"the checkpoint's state format was {document['format']} and is {states.FORMAT}"
    saved = document["facts"]
    names = (name for name in {**facts, **saved} if saved.get(name) != facts.get(name))
    return next((f"the checkpoint's {name} was {saved.get(name)} and is {facts.get(name)}" for name in names), "")


def _fingerprint(model: nn.Module) -> str:
    """The model's class, and a hash of its parameters' names, whole shapes and dtypes."""
    told = [(name, tuple(getattr(p, "ds_shape", p.shape)), str(p.dtype)) for name, p in model.named_parameters()]
    return f"{type(model).__name__} {hashlib.sha256(repr(told).encode()).hexdigest()[:12]}"
