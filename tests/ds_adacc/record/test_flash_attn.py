"""flash-attn's own Functions and operators: replayed once, with the same bits, and never refused.

On a CUDA device with its kernels, elsewhere with stand-ins for them (helpers/flash_attn_here.py).
"""

import functools
import random

import pytest
import torch
import zoo
from flash_attn_here import DEVICE, flash_attn, needs_flash_attn  # noqa: F401
from recorded import profile_of, random_policy, record, under
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.program.function_operator import FunctionOperator
from ds_adacc.runtime.runtime import Runtime

pytestmark = [pytest.mark.gpu, needs_flash_attn]

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
HEADS, TIME = (4, 128) if DEVICE == "cuda" else (2, 12)
PACKINGS = ("", "_kvpacked", "_qkvpacked", "_varlen", "_varlen_kvpacked", "_varlen_qkvpacked")


class Attention(nn.Module):
    """Pre-norm attention. `packing` names the function of flash-attn; heads of 12 numbers are padded by it to 16."""

    def __init__(self, package, packing, dropout, size):
        super().__init__()
        self.attend = getattr(package, f"flash_attn{packing}_func")
        self.is_varlen, self.packed = "varlen" in packing, packing.split("_")[-1]
        self.given = {"dropout_p": dropout, "causal": True, "deterministic": True}
        self.norm, self.qkv = nn.LayerNorm(HEADS * size), nn.Linear(HEADS * size, 3 * HEADS * size)
        self.proj = nn.Linear(HEADS * size, HEADS * size)

    def forward(self, x, edges):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        qkv = qkv.flatten(0, 1) if self.is_varlen else qkv
        tensors = {"qkvpacked": (qkv,), "kvpacked": (qkv[..., 0, :, :], qkv[..., 1:, :, :])}
        out = self.attend(*tensors.get(self.packed, qkv.unbind(-3)), *self._lengths(edges), **self.given)
        return x + self.proj(out.reshape_as(x))

    def _lengths(self, edges):
        if not self.is_varlen:
            return ()
        return (edges, TIME) if self.packed == "qkvpacked" else (edges, edges, TIME, TIME)


def block_of(package, packing, dropout=0.0, size=16):
    torch.manual_seed(0)
    block = Attention(package, packing, dropout, size).to(DEVICE, DTYPE)
    x = torch.randn(2, TIME, HEADS * size, device=DEVICE, dtype=DTYPE, requires_grad=True)
    edges = torch.tensor([0, TIME // 3, TIME, 2 * TIME], dtype=torch.int32, device=DEVICE)
    return block, (x, edges)


@pytest.mark.parametrize("size", [16, 12])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("packing", PACKINGS)
def test_attention_is_replayed_with_the_same_bits(flash_attn, packing, dropout, size):  # noqa: F811
    block, args = block_of(flash_attn, packing, dropout, size)
    expected = zoo.gradients(block, args, {})
    recordings = [record(block, args, {}) for _ in range(8)]
    assert len({recording.digest for recording in recordings}) == 1
    recording = recordings[0]
    assert {op.short_name: op.refusal for op in recording.ops if op.refusal} == {}
    (function,) = [op for op in recording.ops if isinstance(op.func, FunctionOperator)]
    everything = planner.recompute_policy(profile_of(recording))
    assert function.index in recording.segments.replayed(everything.stores)
    for policy in (everything, *(random_policy(recording, seed) for seed in range(3))):
        run, calls = under(block, recording, policy)
        zoo.assert_same_bits(expected, zoo.gradients(block, args, {}, run))
        assert not calls[-1].diverged


@pytest.mark.parametrize("packing", PACKINGS)
def test_roles(flash_attn, packing):  # noqa: F811
    recording = record(*block_of(flash_attn, packing), {})
    (function,) = [op for op in recording.ops if isinstance(op.func, FunctionOperator)]
    packed = recording.values[function.reads[0]]
    others = [recording.values[index].role for index in function.reads[1:]]
    assert (packed.role, others) == ("query", ["block_input"] if "varlen" in packing else [])


def test_roles_of_tensors_of_their_own(flash_attn):  # noqa: F811
    def block(x):
        q, k, v = (x * factor for factor in (0.5, 2.0, 3.0))
        return flash_attn.flash_attn_func(q, k, v), flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2))

    x = torch.randn(1, TIME, HEADS, 16, device=DEVICE, dtype=DTYPE, requires_grad=True)
    recording = record(block, (x,), {})
    attend, packed = (op for op in recording.ops if isinstance(op.func, FunctionOperator))
    assert [recording.values[index].role for index in attend.reads] == ["query", "key", "value"]
    assert [recording.values[index].role for index in packed.reads] == ["query", "key"]
    made = [recording.values[index].role for index in attend.outputs if index is not None]
    assert made[0] == "attention" and set(made[1:]) <= {"statistic", "other"}


@pytest.fixture
def llama(flash_attn, monkeypatch):  # noqa: F811
    """A layer of transformers' LLaMA under `attn_implementation="flash_attention_2"`, and its arguments."""
    from transformers import modeling_flash_attention_utils
    from transformers.models.llama import modeling_llama

    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "1")
    monkeypatch.setattr(modeling_flash_attention_utils, "is_flash_attn_2_available", lambda *_, **__: True)
    shape = {"hidden_size": HEADS * 16, "intermediate_size": 64, "num_attention_heads": HEADS, "num_key_value_heads": 1}
    config = modeling_llama.LlamaConfig(**shape, num_hidden_layers=1, vocab_size=24)
    model = modeling_llama.LlamaModel(config).to(DEVICE, DTYPE)
    config._attn_implementation = "flash_attention_2"  # in the constructor it asks for a CUDA device

    def arguments(positions, **kwargs):
        hidden = torch.randn(*positions.shape, HEADS * 16, device=DEVICE, dtype=DTYPE, requires_grad=True)
        return (hidden,), {"position_embeddings": model.rotary_emb(hidden, positions), **kwargs}

    return model.layers[0].train(), arguments


def test_a_layer_of_transformers_and_packed_texts_whose_lengths_are_given(llama):
    layer, arguments = llama
    texts = torch.cat([torch.arange(TIME // 3), torch.arange(TIME - TIME // 3)])[None].to(DEVICE)
    edges = torch.tensor([0, TIME // 3, TIME], dtype=torch.int32, device=DEVICE)
    lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": TIME, "max_length_k": TIME}
    for args, kwargs in (arguments(torch.arange(TIME, device=DEVICE)[None]), arguments(texts, **lengths)):
        recording = record(layer, args, kwargs)
        assert recording.remarks_on_replays == ()
        assert {op.short_name: op.refusal for op in recording.ops if op.refusal} == {}
        run, calls = under(layer, recording)
        zoo.assert_exact(layer, args, kwargs, run)
        assert not calls[-1].diverged


def test_packed_batches_of_varying_texts_are_predicted(llama):
    layer, arguments = llama
    # On a GPU a deterministic backward takes as much memory as the layer holds, so that little is left to save.
    budget = 0.9 if DEVICE == "cpu" else 0.98
    section = {"memory_budget": budget, "codecs": "none", "rectifier": {"enabled": False}}
    runtime = Runtime(load({"adacc": section}), has_engine=True)
    adacc, lot, recordings = Adacc(runtime), random.Random(0), []
    for step in range(20):
        most = {0: TIME, 1: 2}.get(step, lot.randint(2, TIME))  # first the longest and the shortest of all
        lengths = [most, *(lot.randint(1, most) for _ in range(lot.randint(1, 4)))]
        texts = torch.cat([torch.arange(length) for length in lengths])[None].to(DEVICE)
        edges = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
        args, kwargs = arguments(texts, cu_seq_lens_q=edges, cu_seq_lens_k=edges)
        kwargs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        call = functools.partial(runtime.checkpoint, layer)
        zoo.assert_exact(layer, args, kwargs, call)
        adacc.end_step()
        recordings.append(runtime.recordings)
    assert recordings[4] == recordings[-1]


def test_a_layer_of_transformers_that_works_out_lengths_by_itself_says_where(llama):
    layer, arguments = llama
    padding = torch.ones(2, TIME, dtype=torch.long, device=DEVICE)
    padding[1, TIME // 2 :] = 0
    args, kwargs = arguments(torch.arange(TIME, device=DEVICE)[None].expand(2, -1), attention_mask=padding)
    recording = record(layer, args, kwargs)
    assert recording.remarks_on_replays[-1].startswith("modeling_flash_attention_utils.py:")
    assert "reads data into Python" in recording.remarks_on_replays[-1]
