"""Every backend of SDPA that a device has is recorded eight times over, and attention is never refused."""

import pytest
import torch
import zoo
from recorded import record, under
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
CASES = [
    ("cpu", SDPBackend.FLASH_ATTENTION, 0.0),  # with dropout, the CPU has the one of plain operators only
    *(pytest.param("cuda", backend, dropout, marks=ON_CUDA) for backend in BACKENDS for dropout in (0.0, 0.1)),
]


def attention(device, backend, dropout):
    """A block that attends, and its arguments. Skips the test if the backend does not run here."""

    def block(x):
        q, k, v = (x * factor for factor in (0.5, 2.0, 3.0))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).sin()

    args = (torch.randn(2, 4, 128, 64, device=device, dtype=torch.bfloat16, requires_grad=True),)
    try:
        with sdpa_kernel(backend):
            block(*args)
    except RuntimeError as error:
        pytest.skip(f"{backend.name} does not run here: {error}")
    return block, args


@pytest.mark.parametrize(("device", "backend", "dropout"), CASES)
def test_no_recording_refuses_attention(device, backend, dropout):
    attend, args = attention(device, backend, dropout)

    def block(x):
        with sdpa_kernel(backend):
            return attend(x)

    for _ in range(8):
        recording = record(block, args, {})
        assert {op.short_name: op.refusal for op in recording.ops if op.refusal} == {}
    run, calls = under(block, recording)
    zoo.gradients(torch.nn.Module(), args, {}, run)
    assert len(recording.segments.replayed(calls[-1].bound.policy.stores)) == len(recording.ops) - 1, (
        "all but sin, whose result backward does not need"
    )
    assert not calls[-1].diverged


@pytest.mark.parametrize(("device", "backend", "dropout"), CASES)
def test_no_recording_refuses_a_compiled_graph_with_attention(device, backend, dropout):
    torch._dynamo.reset()
    attend, args = attention(device, backend, dropout)
    compiled = torch.compile(attend)
    with sdpa_kernel(backend):
        for _ in range(8):
            recording = record(compiled, args, {})
            assert [(op.short_name, op.refusal) for op in recording.ops] == [("compiled graph", None)]
        run, calls = under(compiled, recording)
        zoo.gradients(torch.nn.Module(), args, {}, run)
    assert recording.segments.replayed(calls[-1].bound.policy.stores) == (0,) and not calls[-1].diverged
