"""Operators that behave as CUDA's fused attention does, on the CPU: they return the state of their generator.

Without dropout nobody writes to that memory, so it has other bits at each call. Flash attention's is one tensor of two
numbers, beside another that nothing uses; cuDNN's and memory-efficient attention's are two tensors of one.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

# How often each operator has run. Tensors, as guards would see Python's numbers change.
RUNS = {kind: torch.zeros((), dtype=torch.int64) for kind in ("flash", "cudnn", "efficient", "flash_attn")}

_garbage = torch.zeros((), dtype=torch.int64)
_SEEDED = (torch.Tag.nondeterministic_seeded,)


def unwritten(size, dtype=torch.int64):
    """Memory that nobody has written to: it holds another number at each call."""
    state = torch.empty(size, dtype=dtype)
    with _disable_current_modes():  # no kernel of CUDA's reads another tensor for this
        state.view(torch.int64).copy_(_garbage.add_(1 << 32))
    return state


def _run(kind, q, k, v, dropout, *states):
    """Output and log-sum-exp. A kernel with dropout draws a seed, and hands it on in its first state."""
    with _disable_current_modes():
        RUNS[kind] += 1
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    if dropout:
        for state in states:
            state.view(torch.int64).zero_()
        states[0].view(torch.int64).view(-1)[:1] = torch.randint(1 << 40, (1,))
        out = out * mask(out, states[0])
    return out, lse


def mask(out, state, dropout=0.3):
    """What each number is multiplied by, drawn from the seed that the state holds."""
    generator = torch.Generator().manual_seed(int(state.view(torch.int64).view(-1)[0]))
    return (torch.rand(out.shape, generator=generator) > dropout) / (1 - dropout)


@torch.library.custom_op("ds_adacc_tests::flash", mutates_args=(), tags=_SEEDED)
def flash(q: Tensor, k: Tensor, v: Tensor, dropout: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    state, unused = unwritten(2, torch.uint64), unwritten((), torch.uint64)
    return *_run("flash", q, k, v, dropout, state, unused), state, unused, q.new_empty(0)


@torch.library.custom_op("ds_adacc_tests::cudnn", mutates_args=(), tags=_SEEDED)
def cudnn(q: Tensor, k: Tensor, v: Tensor, dropout: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    seed, offset = unwritten(()), unwritten(())
    return *_run("cudnn", q, k, v, dropout, seed, offset), seed, offset, q.new_empty(0)


@torch.library.custom_op("ds_adacc_tests::efficient", mutates_args=(), tags=_SEEDED)
def efficient(q: Tensor, k: Tensor, v: Tensor, dropout: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seed, offset = unwritten(()), unwritten(())
    return *_run("efficient", q, k, v, dropout, seed, offset), seed, offset


@torch.library.custom_op("flash_attn::forward_of_the_tests", mutates_args=())
def flash_attn(q: Tensor, k: Tensor, v: Tensor, dropout: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `flash_attn::_flash_attn_forward` of flash-attn 2: without a tag; with an empty S_dmask before its state."""
    state = unwritten(2)
    return *_run("flash_attn", q, k, v, dropout, state), q.new_empty(0), state


OPERATORS = {"flash": flash, "cudnn": cudnn, "efficient": efficient, "flash_attn": flash_attn}


def _keep(ctx, inputs, output):
    *tensors, ctx.dropout = inputs
    ctx.save_for_backward(*tensors, *(each for each in output if each.numel()))


def _backward(ctx, grad, *_):
    q, k, v, out, lse, state = ctx.saved_tensors[:6]
    if ctx.dropout:
        grad = grad * mask(out, state)
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    return *grads, None


for _operator in OPERATORS.values():
    _operator.register_autograd(_backward, setup_context=_keep)


class FlashAttnFunc(torch.autograd.Function):
    """As flash-attn's: a Function around its own operator, whose memory no one outside of it can fill.

    It pads heads to a multiple of 8 numbers, and returns a part of what it saves.
    """

    @staticmethod
    def forward(ctx, q, k, v, dropout, scale, causal, window, softcap, alibi, deterministic, softmax, grad_enabled):
        needs_grad = grad_enabled and any(x.requires_grad for x in (q, k, v))
        ctx.size = q.shape[-1]
        ctx.padding = -ctx.size % 8
        q, k, v = (F.pad(x, [0, ctx.padding]) for x in (q, k, v)) if ctx.padding else (q, k, v)
        out, lse, _, state = flash_attn(q, k, v, dropout > 0)
        if needs_grad:
            ctx.save_for_backward(q, k, v, out, lse, state)
            ctx.dropout = dropout > 0
        return out[..., : ctx.size]

    @staticmethod
    def backward(ctx, grad):
        grad = F.pad(grad, [0, ctx.padding]) if ctx.padding else grad
        return *(each[..., : ctx.size] for each in _backward(ctx, grad)[:3]), *(None,) * 9


class Block(nn.Module):
    """Pre-norm attention and an MLP; `kind` names the operator.

    Or it is "function" for flash-attn's Function, "padded" for heads that it pads.
    """

    def __init__(self, kind, dropout=False, width=16, heads=2):
        super().__init__()
        self.kind, self.dropout, self.heads = kind, dropout, heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        parts = self.qkv(self.ln1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous() for part in parts)
        if self.kind in ("function", "padded"):
            plain = (None, True, (-1, -1), 0.0, None, False, False, torch.is_grad_enabled())
            out = FlashAttnFunc.apply(q, k, v, 0.3 if self.dropout else 0.0, *plain)
        else:
            out, *_ = OPERATORS[self.kind](q, k, v, self.dropout)
        x = x + self.proj(out.transpose(1, 2).flatten(-2))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))
