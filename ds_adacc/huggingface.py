"""Use ds_adacc in Hugging Face's Trainer: `Trainer(..., callbacks=[AdaccCallback()])`."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ds_adacc.config import SECTION
from ds_adacc.engine.patch_initialize import patch_deepspeed
from ds_adacc.log import get_logger


class AdaccCallback(TrainerCallback):
    """Makes the Trainer's model run as the "adacc" section of its ds_config says, under any ZeRO stage.

    When the Trainer is constructed, `deepspeed.initialize` is replaced by `ds_adacc.initialize`, for every engine of
    this process. The Trainer calls it later; under ZeRO-3 the blocks must be known at that call. If the
    TrainingArguments enable gradient checkpointing, ds_adacc does it.
    """

    def __init__(self) -> None:
        self._is_in_time = False

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        plugin = args.deepspeed_plugin
        if plugin is not None:
            _leave_out_auto(plugin.hf_ds_config.config.get(SECTION))
        self._is_in_time = True
        patch_deepspeed()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.deepspeed_plugin is None:
            get_logger().warning(
                "adacc does nothing in this Trainer, as it trains without DeepSpeed: pass "
                'TrainingArguments(deepspeed="ds_config.json"), where ds_config.json has an "adacc" section'
            )
        elif is_initialized() and AcceleratorState().distributed_type is not DistributedType.DEEPSPEED:
            get_logger().warning(
                "adacc does nothing in this Trainer: its TrainingArguments have a DeepSpeed config, but accelerate "
                "trains without DeepSpeed, as it does where ACCELERATE_USE_CPU is set. If it is set, unset it; start "
                "the script by `deepspeed` or `accelerate launch`"
            )
        elif not self._is_in_time:
            get_logger().warning(
                "adacc does nothing in this Trainer, as the callback came too late: pass it to the Trainer, as in "
                "Trainer(..., callbacks=[AdaccCallback()]), in place of trainer.add_callback"
            )


def _leave_out_auto(section: Any) -> None:
    """Remove each key whose value is "auto", so that its default applies. The Trainer would fail to fill it in."""
    if isinstance(section, dict):
        for key in [key for key, value in section.items() if value == "auto"]:
            del section[key]
