"""The real Liger-Kernel, patched into a LLaMA of transformers by its own call, where Triton runs."""

import pytest
import torch
import zoo
from recorded import profile_of, random_policy, record, under

from ds_adacc import planner
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.program.functions import FunctionCall

pytestmark = pytest.mark.gpu


@pytest.fixture
def layer():
    transformers = pytest.importorskip("transformers")
    liger = pytest.importorskip("liger_kernel.transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4, vocab_size=128
    )
    model = transformers.LlamaForCausalLM(config).cuda().bfloat16()
    liger.apply_liger_kernel_to_llama(model=model)
    hidden = torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(64, device="cuda")[None].expand(2, -1)
    kwargs = {"position_embeddings": model.model.rotary_emb(hidden, positions), "position_ids": positions}
    return model.model.layers[0], (hidden,), kwargs


def test_liger_kernel_is_replayed(layer):
    block, args, kwargs = layer
    expected = zoo.gradients(block, args, kwargs)
    recording = record(block, args, kwargs)
    functions = [op for op in recording.ops if isinstance(op.func, FunctionCall)]
    assert len(functions) >= 3 and not recording.remarks_on_functions
    rebuildable = block_graph(recording).rebuildable_ops
    owned = [recording.values[i] for i in recording.saved if recording.values[i].owned]
    rebuilt = sum(value.nbytes for value in owned if value.producer in rebuildable)
    assert rebuilt >= 0.9 * sum(value.nbytes for value in owned)
    policies = planner.recompute_policy(profile_of(recording)), *(random_policy(recording, seed) for seed in range(5))
    for policy in policies:
        run, _ = under(block, recording, policy)
        zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))
