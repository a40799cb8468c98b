"""flash-attn on this machine: its kernels run on a CUDA device. Without one, its Python runs over stand-ins for them.

The package without its kernels, 4 MB, is installed by

    FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE \
        .venv/bin/pip install --no-build-isolation --no-deps wheel flash-attn

Everything but the kernels is then flash-attn's own: its Functions, and its operators with their schemas.
"""

import importlib.util
import sys
import types
from itertools import pairwise

import pytest
import torch
from attention import mask, unwritten
from opaque import array

KERNELS = "flash_attn_2_cuda"  # its compiled module
DEVICE = "cuda" if torch.cuda.is_available() and importlib.util.find_spec(KERNELS) else "cpu"
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

needs_flash_attn = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")


@pytest.fixture(scope="module")
def flash_attn():
    """The package. On the CPU its four operators get kernels there, which call the stand-ins."""
    if DEVICE == "cuda":
        yield importlib.import_module("flash_attn")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, KERNELS, stand_ins())
        package = importlib.import_module("flash_attn")
        for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
            operator = getattr(sys.modules["flash_attn.flash_attn_interface"], f"_flash_attn_{name}")
            operator.register_kernel("cpu")(operator._init_fn)
        yield package


def stand_ins() -> types.ModuleType:
    """The functions of flash-attn's compiled module that training calls. They know neither windows, ALiBi nor softcap.

    As there, the state of the generator is memory that nobody writes to where there is no dropout.
    """
    module = types.ModuleType(KERNELS)
    module.fwd, module.bwd = _forward, _backward
    module.varlen_fwd, module.varlen_bwd = _varlen_forward, _varlen_backward
    return module


def _forward(q, k, v, out, alibi, dropout, scale, causal, left, right, softcap, *_):
    assert (out, alibi, left, right, softcap) == (None, None, -1, -1, 0.0)
    out, lse = _attend(q, k, v, scale, causal)
    state = _state(dropout)
    return out * _mask(out, dropout, state), lse, q.new_empty(0), state


def _backward(grad, q, k, v, out, lse, dq, dk, dv, alibi, dropout, scale, causal, *rest):
    if dropout:
        grad, (out, lse) = grad * _mask(out, dropout, rest[-1]), _attend(q, k, v, scale, causal)
    for to, made in zip((dq, dk, dv), _attend_backward(grad, q, k, v, out, lse, scale, causal), strict=True):
        to.copy_(made)
    return dq, dk, dv, torch.empty_like(lse)


def _varlen_forward(q, k, v, out, cu_q, cu_k, used, leftpad, table, alibi, max_q, max_k, *options):
    assert (out, used, leftpad, table) == (None, None, None, None)
    dropout, scale, _, *rest = options
    made = [_forward(*texts, None, alibi, 0.0, scale, *rest)[:2] for texts in _texts(cu_q, cu_k, q, k, v)]
    out, lse = torch.cat([each[0] for each, _ in made]), torch.cat([each[0] for _, each in made], 1)
    state = _state(dropout)
    return out * _mask(out, dropout, state), lse, q.new_empty(0), state


def _varlen_backward(grad, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, alibi, max_q, max_k, *options):
    dropout, scale, _, causal, *rest = options
    if dropout:
        grad = grad * _mask(out, dropout, rest[-1])
        out, lse, *_ = _varlen_forward(
            q, k, v, None, cu_q, cu_k, None, None, None, alibi, max_q, max_k, 0.0, scale, False, causal, -1, -1, 0.0
        )
    texts = _texts(cu_q, cu_k, q, k, v)
    for of_q, of_k in zip(_parts(cu_q), _parts(cu_k), strict=True):
        saved = *next(texts), out[None, of_q], lse[None, :, of_q].contiguous()
        made = _attend_backward(grad[None, of_q], *saved, scale, causal)
        dq[of_q], dk[of_k], dv[of_k] = (each[0] for each in made)
    return dq, dk, dv, torch.empty_like(lse)


def _texts(cu_q, cu_k, q, k, v):
    """Each text's q, k and v, as a batch of one."""
    for of_q, of_k in zip(_parts(cu_q), _parts(cu_k), strict=True):
        yield q[None, of_q], k[None, of_k], v[None, of_k]


def _parts(edges):
    """Read by address, as a kernel does: reading them into Python would be a reason for refusal."""
    return [slice(*pair) for pair in pairwise(array(edges).tolist())]


def _attend(q, k, v, scale, causal):
    """Output of (batch, time, heads, size), as are all arguments, and log-sum-exp of (batch, heads, time)."""
    out, lse = _ATTENTION(*_by_head(q, k, v), 0.0, causal, scale=scale)
    return out.transpose(1, 2).contiguous(), lse


def _attend_backward(grad, q, k, v, out, lse, scale, causal):
    grads = _BACKWARD(*_by_head(grad, q, k, v, out), lse, 0.0, causal, scale=scale)
    return _by_head(*grads)


def _by_head(*tensors):
    return [each.transpose(1, 2) for each in tensors]


def _state(dropout):
    """A seed and an offset; without dropout memory that nobody has written to."""
    return torch.randint(1 << 40, (2,)) if dropout else unwritten(2)


def _mask(out, dropout, state):
    return mask(out, state, dropout) if dropout else 1.0
