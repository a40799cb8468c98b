"""The real Liger-Kernel, patched into a LLaMA of transformers by its own call.

On a CUDA device its kernels run compiled, elsewhere in Triton's interpreter.
"""

import copy

import pytest
import torch
import zoo
from recorded import profile_of, random_policy, record, under
from torch import nn
from triton_here import DEVICE, interpreter, needs_triton  # noqa: F401

from ds_adacc import planner
from ds_adacc.execute.copied_for_backward import copied
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.program.function_operator import FunctionOperator

WIDTH, TIME, VOCABULARY = (256, 64, 128) if DEVICE == "cuda" else (32, 5, 24)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


pytestmark = [pytest.mark.gpu, needs_triton]


@pytest.fixture(scope="module")
def llama():
    liger = pytest.importorskip("liger_kernel.transformers", reason="needs Liger-Kernel")
    from transformers.models.llama import modeling_llama

    torch.manual_seed(0)
    config = modeling_llama.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        attn_implementation="eager",  # backward of other attention is not deterministic on a CUDA device
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in list(vars(modeling_llama).items()):  # Liger-Kernel exchanges some of it for all models
            patch.setattr(modeling_llama, name, value)
        model = modeling_llama.LlamaForCausalLM(config).to(DEVICE, DTYPE)
        liger.apply_liger_kernel_to_llama(model=model)
        yield model


def refused(recording):
    """What is never replayed, neither by itself nor together with what overwrites it."""
    bases = {part.index for op in recording.ops if op.replayable for part in op.parts}
    return [(op.short_name, op.refusal) for op in recording.ops if op.index not in bases]


def same_gradients(block, args, kwargs, policies):
    """The recording, under which gradients have the bits of plain autograd; and the names of its Functions."""
    expected = zoo.gradients(block, args, kwargs)
    recording = record(block, args, kwargs)
    chosen = planner.recompute_policy(profile_of(recording))
    for policy in (chosen, *(random_policy(recording, seed) for seed in range(policies))):
        run, calls = under(block, recording, policy)
        zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))
        assert not calls[0].diverged
    return recording, [op.short_name for op in recording.ops if isinstance(op.func, FunctionOperator)]


def arguments(model):
    hidden = torch.randn(2, TIME, WIDTH, device=DEVICE, dtype=DTYPE, requires_grad=True)
    positions = torch.arange(TIME, device=DEVICE)[None].expand(2, -1)
    return (hidden,), {"position_embeddings": model.model.rotary_emb(hidden, positions), "position_ids": positions}


def test_a_layer_is_replayed(llama):
    recording, functions = same_gradients(llama.model.layers[0], *arguments(llama), policies=3)
    assert refused(recording) == []
    assert functions == ["LigerRMSNormFunction", "LigerRopeFunction", "LigerRMSNormFunction", "LigerSiLUMulFunction"]
    assert not recording.remarks_on_replays
    rebuildable = block_graph(recording).rebuildable_ops
    owned = [recording.values[index] for index in recording.saved if recording.values[index].owned]
    rebuilt = sum(value.nbytes for value in owned if value.producer in rebuildable)
    assert rebuilt >= 0.9 * sum(value.nbytes for value in owned)
    roles = {value.label: value.role for value in recording.values if value.index in recording.saved}
    assert roles["input_layernorm out"] == roles["post_attention_layernorm out"] == "layernorm"
    assert roles["mlp.gate_proj out"] == roles["mlp.up_proj out"] == "gelu"
    assert copied(recording, [op.index for op in recording.ops if op.replayable]) == frozenset()


def test_a_layer_with_lora_is_replayed(llama):
    """RoPE overwrites the sum of a projection and its adapter."""
    peft = pytest.importorskip("peft")
    layer = copy.deepcopy(llama.model.layers[0])
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), layer)
    recording, functions = same_gradients(adapted.to(DEVICE, DTYPE), *arguments(llama), policies=1)
    assert len(functions) == 4 and refused(recording) == []


def test_the_fused_loss_is_refused_because_it_reads_data(llama):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.loss = llama.lm_head, LigerFusedLinearCrossEntropyLoss()

        def forward(self, hidden):
            target = torch.arange(len(hidden), device=DEVICE) % VOCABULARY
            return self.loss(self.head.weight, hidden.tanh(), target)

    hidden = torch.randn(TIME, WIDTH, device=DEVICE, dtype=DTYPE, requires_grad=True)
    recording, functions = same_gradients(Loss(), (hidden,), {}, policies=2)
    assert functions == ["LigerFusedLinearCrossEntropyFunction"]
    assert recording.remarks_on_replays == (f"{functions[0]}: never replayed: reads data into Python",)
    assert {op.short_name: op.refusal for op in recording.ops}["tanh"] is None
