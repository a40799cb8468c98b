"""The fine-tuning example: batches of texts, and a short run in Hugging Face's Trainer."""

import processes
import pytest
import torch
from launch import on_ranks

finetune = pytest.importorskip("finetune", reason="needs transformers and peft")


def test_a_batch_is_as_long_as_its_longest_text():
    batch = finetune.collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, finetune.NOT_A_TARGET, finetune.NOT_A_TARGET]]
    assert all(each.dtype is torch.int64 for each in batch.values())


def test_texts_have_different_lengths_up_to_the_most():
    lengths = {len(text) for text in finetune.texts(40)}
    assert max(lengths) == 40 and len(lengths) > 20


@pytest.mark.ranks
def test_three_steps(tmp_path):
    script = processes.ROOT / "examples" / "finetune.py"
    options = ["--deepspeed", processes.ROOT / "ds_configs" / "trainer.json", "--output_dir", tmp_path, "--use_cpu"]
    options += ["--length", "32", "--per_device_train_batch_size", "2", "--max_steps", "3", "--save_strategy", "no"]
    (said,) = on_ranks(script, *options, "--report_to", "none", "--logging_steps", "1", ranks=1)
    assert "4 blocks found" in said and "LlamaDecoderLayer" in said
    assert said.count("'loss'") == 3
