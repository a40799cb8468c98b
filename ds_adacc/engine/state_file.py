"""The file in a checkpoint with the state of ds_adacc. A run resumed from it continues as if never interrupted."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from ds_adacc.execute.block import Block
from ds_adacc.kernels.atomic_write import atomic_write
from ds_adacc.steps.saved_state import State

FORMAT = 15
_STATE = TypeAdapter(State)
_TENSORS = {"blocks", "seeds"}  # its fields that hold some


def write(path: Path, facts: Mapping[str, Any], state: State) -> None:
    """Save the state, and the `facts` under which it is valid. Raises OSError; never leaves a partial file."""
    document = {
        "format": FORMAT,
        "facts": dict(facts),
        "plain": _STATE.dump_python(state, mode="json", exclude=_TENSORS),
        **{name: getattr(state, name) for name in _TENSORS},
    }
    content = io.BytesIO()
    torch.save(document, content)  # into memory: with a full disk torch.save would raise RuntimeError
    atomic_write(path, content.getbuffer())


def read(path: Path) -> Mapping[str, Any]:
    """The document that `write` saved, not checked yet. Runs no code from the file. Raises what torch.load raises."""
    return torch.load(path, map_location="cpu", weights_only=True)


def parse(document: Mapping[str, Any]) -> State:
    """The state in a document of format `FORMAT`. Raises ValueError, TypeError or LookupError if it is damaged."""
    state = _STATE.validate_python({**document["plain"], **{name: document[name] for name in _TENSORS}})
    state.agreement.check()
    for block in state.blocks:  # find damage here: restoring must not fail on one rank only
        Block.from_plain(block), dict(block["indices"])
    return state
