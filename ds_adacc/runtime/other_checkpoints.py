"""Other checkpoints. One around a block is an error. One inside a block recomputes what runs in it, whatever the plan
says, and is reported to the user."""

from __future__ import annotations

import inspect
import sys
import traceback

from ds_adacc.python_state.libraries import is_library, is_trusted
from ds_adacc.python_watch.watch import Watch
from ds_adacc.runtime import plain_calls

_CHECKPOINTS = {  # modules, and what to do about a call of each
    "torch.utils.checkpoint": "call the block itself there, without torch.utils.checkpoint",
    "deepspeed.runtime.activation_checkpointing.checkpointing": (
        "import ds_adacc.checkpointing there in place of deepspeed.checkpointing; or start the script by ds_adacc.run, "
        "which does so; or call the block itself"
    ),
}
_OF_PACKAGES = (
    "turn off the gradient checkpointing of that package (in timm model.set_grad_checkpointing(False), in others often "
    "model.gradient_checkpointing_disable())"
)
_ENTRIES = {"checkpoint", "non_reentrant_checkpoint", "checkpoint_sequential"}  # their functions that users call


class CheckpointedTwice(RuntimeError):
    """A block of ds_adacc runs inside another checkpoint. The text names the call and the remedy."""


def refuse_checkpointed(name: str) -> None:
    """Raise CheckpointedTwice if the present call of the block runs inside a checkpoint of torch or DeepSpeed."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    for frame in frames:
        module = frame.f_globals.get("__name__")
        if module == plain_calls.__name__:
            return  # a block of another engine calls this one, and torch checkpoints that in place of ds_adacc
        if module in _CHECKPOINTS and frame.f_code.co_name in _ENTRIES:
            user = next((each for each in frames if not is_trusted(str(each.f_globals.get("__name__")))), None)
            site = "" if user is None else f" in line {user.f_lineno} of {user.f_code.co_filename}"
            is_installed = user is not None and is_library(user.f_globals.get("__name__"))
            remedy = _OF_PACKAGES if is_installed else _CHECKPOINTS[module]
            raise CheckpointedTwice(
                f"block {name} runs inside {module}, which is called{site}. Both would decide what its backward "
                f"recomputes, and the plan could not be kept. To fix it: {remedy}; or disable ds_adacc "
                '("adacc": {"enabled": false})'
            )


def checkpoint_inside(watch: Watch) -> str | None:
    """The module of the checkpoint that a recorded block has called in its forward; None if it has called none."""
    for module in _CHECKPOINTS.keys() & sys.modules.keys():
        entries = (getattr(sys.modules[module], name, None) for name in _ENTRIES)
        if any(watch.has_seen(inspect.unwrap(entry).__code__) for entry in entries if entry is not None):
            return module
    return None
