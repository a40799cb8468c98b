"""The test with TRL: its SFTTrainer on texts of all lengths, each batch padded to its longest text."""

from __future__ import annotations

import json
import random

import deepspeed
import families
from accelerate.state import AcceleratorState
from datasets import load_dataset
from held import watch_held
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from zero_cases import trainer_config

from ds_adacc.huggingface import AdaccCallback

STEPS, BATCH, LONGEST = 16, 2, 60
SECTION = {"memory_budget": 0.6, "codecs": "none", "rectifier": {"max_interval": 16}, "solver": {"max_seconds": 30.0}}
WORDS = [f"word{number}" for number in range(90)]
DS_INITIALIZE = deepspeed.initialize


def tokenizer():
    special = {"unk_token": "[unknown]", "pad_token": "[pad]", "eos_token": "[end]"}
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*special.values(), *WORDS])}, "[unknown]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def texts(out):
    """Random texts of any length, read from a file."""
    lot = random.Random(0)
    file = str(out / "texts.jsonl")
    with open(file, "w") as lines:
        for _ in range(2 * STEPS * BATCH):
            text = " ".join(lot.choices(WORDS, k=lot.randrange(4, LONGEST)))
            lines.write(json.dumps({"text": text}) + "\n")
    return load_dataset("json", data_files=file, split="train", cache_dir=str(out / "cache"))


class Telling(SFTTrainer):
    """Keeps each step's loss as it is and the length of its batch; with ds_adacc, also what it did in that step."""

    def training_step(self, model, inputs, *args, **kwargs):
        adacc = getattr(self.model_wrapped, "adacc", None)
        if not hasattr(self, "steps"):
            self.steps, self.held = [], watch_held(adacc.runtime.controller) if adacc else []
        purpose = adacc and adacc.runtime.controller.step.purpose.value
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.steps.append({"loss": loss.item(), "length": inputs["input_ids"].shape[1]})
        if adacc:
            self.steps[-1] |= {"purpose": purpose, "held": self.held[-1], "recordings": adacc.runtime.recordings}
        return loss


def train(out, served):
    """The steps of an SFTTrainer under ZeRO-2, plain or with the callback, a section and gradient checkpointing."""
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = SFTConfig(
        str(out),
        deepspeed=trainer_config(2, SECTION if served else None),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_checkpointing=served,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    model, _ = families.example("llama")
    callbacks = [AdaccCallback()] if served else []
    work = Telling(model, arguments, train_dataset=texts(out), processing_class=tokenizer(), callbacks=callbacks)
    work.train()
    deepspeed.initialize = DS_INITIALIZE
    return work.steps


def main(out):
    """The steps without ds_adacc, and those with it."""
    return [train(out, served) for served in (False, True)]
