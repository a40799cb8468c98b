"""Models whose batches vary as in practice: exact at every step, recorded at few sizes, held as planned."""

import copy
import random

import pytest
import torch
import transformers as hf
import zoo
from cases import further
from held import watch_held
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.runtime.find_blocks import find_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks

STEPS = 16
SECTION = {"memory_budget": 0.6, "codecs": "none", "rectifier": {"enabled": False}, "solver": {"max_seconds": 2.0}}


def whisper(lot):
    """Sound of one length, text of any: the encoder's blocks see one size, the decoder's many.

    A cache of keys goes from layer to layer of the decoder, as it does in training unless `use_cache` is off.
    """
    torch.manual_seed(0)
    config = hf.WhisperConfig(
        vocab_size=99,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=64,
        **{f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")},
        **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def batch():
        labels = torch.randint(3, 99, (2, lot.randrange(4, 40)))
        return {"input_features": torch.randn(2, 8, 32), "labels": labels}

    return hf.WhisperForConditionalGeneration(config), batch


def t5(lot):
    """Encoder and decoder each see another length in every batch."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99}

    def batch():
        return {
            "input_ids": torch.randint(3, 99, (2, lot.randrange(6, 40))),
            "labels": torch.randint(3, 99, (2, lot.randrange(4, 20))),
        }

    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0)), batch


def crops(lot):
    """A vision transformer that sees large and small crops."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = hf.ViTConfig(**sizes, hidden_dropout_prob=0.1, image_size=16, patch_size=4)

    def batch():
        count, size = lot.choice(((2, 16), (6, 8)))
        pixels = torch.randn(count, 3, size, size)
        return {"pixel_values": pixels, "labels": torch.zeros(count).long(), "interpolate_pos_encoding": True}

    return hf.ViTForImageClassification(config), batch


class SubsetBlock(nn.Module):
    """Drop path on subsets of the batch, as DINOv2 has it: half of the samples skip the residual branch."""

    def __init__(self, rate):
        super().__init__()
        self.rate, self.norm = rate, nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        kept = max(int(len(x) * (1 - self.rate)), 1)
        chosen = torch.randperm(len(x))[:kept]
        residual = self.mlp(self.norm(x[chosen]))
        return torch.index_add(x, 0, chosen, residual, alpha=len(x) / kept)


class Subsets(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(SubsetBlock(0.1 * (1 + number)) for number in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return hf.utils.ModelOutput(loss=x.square().mean())


def subsets(lot):
    torch.manual_seed(0)
    return Subsets(), lambda: {"x": torch.randn(*lot.choice(((8, 9), (12, 5))), 32)}


def gradients(model, inputs, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("make", "most"), [(whisper, 8), further(t5, 12), (crops, 7), (subsets, 8)])
def test_every_step_is_exact_and_few_sizes_are_recorded(make, most):
    lot = random.Random(3)
    model, batch = make(lot)
    model.train()
    plain = copy.deepcopy(model)
    runtime = Runtime(load({"adacc": SECTION}), has_engine=True)
    blocks = find_blocks(model, "auto")
    wrap_blocks(blocks, runtime)
    adacc = Adacc(runtime, blocks)
    held, recordings = watch_held(runtime.controller), [0]
    for step in range(STEPS):
        torch.manual_seed(1000 + step)
        inputs = batch()
        zoo.assert_same_bits(gradients(plain, inputs, step), gradients(model, inputs, step))
        adacc.end_step()
        recordings.append(runtime.recordings)
    assert runtime.recordings <= most
    steady = [pair for pair, before, after in zip(held, recordings, recordings[1:], strict=False) if before == after]
    # What is held of a mask in whole bytes is predicted to the next byte.
    assert steady and all(observed <= planned <= observed + 8 for planned, observed in steady)
