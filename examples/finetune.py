"""Fine-tune a language model with LoRA in Hugging Face's Trainer, on texts of different lengths.

deepspeed --num_gpus 1 examples/finetune.py --deepspeed ds_configs/trainer.json --output_dir runs/finetune

All that ds_adacc needs is the callback, and the "adacc" section in the config. Needs transformers, accelerate and peft.
On a machine without a GPU, add --use_cpu.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from train import BYTES, standard_library
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from ds_adacc.huggingface import AdaccCallback

NOT_A_TARGET = -100  # a label that the loss of transformers leaves out


@dataclass
class Arguments:
    """What this script has besides the Trainer's own arguments."""

    model: str = field(default="", metadata={"help": "name or folder; by default a small LLaMA of random weights"})
    length: int = field(default=256, metadata={"help": "tokens of a text at most"})


def texts(most: int) -> list[str]:
    """The paragraphs of Python's own sources, cut to so many characters."""
    paragraphs = standard_library()[0].decode(errors="ignore").split("\n\n")
    return [paragraph[:most] for paragraph in paragraphs if len(paragraph) > 1]


def small_model() -> nn.Module:
    """A LLaMA over bytes."""
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch as long as its longest text: int64 tensors (batch, length)."""
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True),
        "labels": pad_sequence(tokens, batch_first=True, padding_value=NOT_A_TARGET),
    }


def main() -> None:
    own, arguments = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    if own.model:
        tokenizer = AutoTokenizer.from_pretrained(own.model)
        model = AutoModelForCausalLM.from_pretrained(own.model)
        rows = [tokenizer(text, truncation=True, max_length=own.length) for text in texts(8 * own.length)]
    else:
        model = small_model()
        rows = [{"input_ids": list(text.encode())[: own.length]} for text in texts(own.length)]
    model = get_peft_model(
        model, LoraConfig(r=8, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    trainer = Trainer(model, arguments, collate, train_dataset=rows, callbacks=[AdaccCallback()])
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)


if __name__ == "__main__":
    main()
