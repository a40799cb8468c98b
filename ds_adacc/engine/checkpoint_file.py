"""What a resumed run needs to go on as if it had not been interrupted, as a file in a checkpoint."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from ds_adacc.execute.block import Block
from ds_adacc.runtime.runtime import RuntimeState

FORMAT = 2


@dataclass(frozen=True)
class State:
    """Of one rank, after a whole number of optimizer steps.

    `blocks` are `StepController.blocks_to_plain`'s. `seeds` is the state of the generator of stochastic rounding,
    uint8; None leaves it as it is.
    """

    runtime: RuntimeState = field(default_factory=RuntimeState)
    blocks: Sequence[Mapping[str, Any]] = ()
    seeds: torch.Tensor | None = None


_RUNTIME = TypeAdapter(RuntimeState)


def write(path: Path, facts: Mapping[str, Any], state: State) -> None:
    """Save the state and the `facts` under which it is of use. Raises OSError; there is never half a file."""
    document = {
        "format": FORMAT,
        "facts": dict(facts),
        "runtime": _RUNTIME.dump_python(state.runtime, mode="json"),
        "blocks": list(state.blocks),
        "seeds": state.seeds,
    }
    content = io.BytesIO()
    torch.save(document, content)  # to a full disk it would raise RuntimeError
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        new.write_bytes(content.getbuffer())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def read(path: Path) -> Mapping[str, Any]:
    """The document that `write` left, yet to be checked. Runs no code that it may hold; raises what torch.load does."""
    return torch.load(path, map_location="cpu", weights_only=True)


def parse(document: Mapping[str, Any]) -> State:
    """The state in a document of `FORMAT`. Raises ValueError, TypeError or LookupError for one that is garbled."""
    state = State(
        _RUNTIME.validate_python(document["runtime"]),
        document["blocks"],
        document["seeds"],
    )
    state.runtime.controller.coordinator.check()
    for block in state.blocks:  # restoring must not find out on one rank that a file is garbled
        Block.from_plain(block), dict(block["indices"])
    return state
