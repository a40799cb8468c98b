"""ds_adacc in Hugging Face's Trainer: `Trainer(..., callbacks=[AdaccCallback()])`."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ds_adacc.config import SECTION
from ds_adacc.engine.patch import patch_deepspeed
from ds_adacc.log import get_logger
from ds_adacc.runtime.wrap import has_wrapped_blocks


class AdaccCallback(TrainerCallback):
    """Makes the Trainer's model run as the "adacc" section of its ds_config says, under any ZeRO stage.

    From the construction of the Trainer on, `deepspeed.initialize` is `ds_adacc.initialize`, for every engine of this
    process: the Trainer calls it later, and under ZeRO-3 the blocks must be known by then. Gradient checkpointing that
    the TrainingArguments ask for is done by ds_adacc.
    """

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        plugin = args.deepspeed_plugin
        if plugin is not None:
            _leave_out_auto(plugin.hf_ds_config.config.get(SECTION))
        patch_deepspeed()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        if not has_wrapped_blocks(model):
            get_logger().warning(
                "adacc does nothing in this Trainer, as no block of the model is wrapped: pass "
                'TrainingArguments(deepspeed="ds_config.json") with an "adacc" section; if you do, name the classes of '
                "the model's blocks in adacc.blocks"
            )


def _leave_out_auto(section: Any) -> None:
    """Remove each "auto" of the section. The Trainer would try to fill it in, and fail; here it is the default."""
    if isinstance(section, dict):
        for key in [key for key, value in section.items() if value == "auto"]:
            del section[key]
