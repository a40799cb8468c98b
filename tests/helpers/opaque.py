"""`autograd.Function`s whose kernels write by address, as those of Liger-Kernel, flash-attn and apex do."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

_CTYPES = {
    torch.float32: ctypes.c_float,
    torch.int64: ctypes.c_int64,
    torch.int32: ctypes.c_int32,
    torch.uint8: ctypes.c_uint8,
}


def array(tensor):
    """The tensor's memory as an array, by its address: nothing sees that it is read or written to."""
    assert tensor.is_contiguous()
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), np.float32)
    memory = (_CTYPES[tensor.dtype] * tensor.numel()).from_address(tensor.data_ptr())
    return np.frombuffer(memory, memory._type_).reshape(tuple(tensor.shape))


class RMSNorm(torch.autograd.Function):
    """As Liger's: saves its input, the weight and one number a row."""

    @staticmethod
    def forward(ctx, x, weight, eps, mode="llama"):
        x = x.contiguous()
        y, rstd = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32)
        a = array(x)
        array(rstd)[...] = 1 / np.sqrt((a * a).mean(-1) + np.float32(eps))
        array(y)[...] = a * array(rstd)[..., None] * array(weight)
        ctx.mode = mode
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        n = x * rstd[..., None]
        g = grad * weight
        return (g - n * (g * n).mean(-1, keepdim=True)) * rstd[..., None], (grad * n).flatten(0, -2).sum(0), None, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        y = torch.empty_like(gate)
        a = array(gate)
        array(y)[...] = a / (1 + np.exp(-a)) * array(up)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        s = gate.sigmoid()
        return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


class Rope(torch.autograd.Function):
    """Writes to new memory; saves what it turns by."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return tuple(_turned(x.contiguous(), array(cos), array(sin)) for x in (q, k))

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        cos, sin = (array(each) for each in ctx.saved_tensors)
        return *(_turned(grad.contiguous(), cos, -sin) for grad in (grad_q, grad_k)), None, None


class RopeInPlace(torch.autograd.Function):
    """As Liger's: writes to its arguments without saying so, and returns views of them."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        for x in (q, k):
            turned = _turned(x, array(cos), array(sin))
            array(x)[...] = array(turned)
        ctx.save_for_backward(cos, sin)
        return q.view_as(q), k.view_as(k)

    backward = Rope.backward


def _turned(x, cos, sin):
    y, a = torch.empty_like(x), array(x)
    half = a.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None]
    array(y)[..., :half] = a[..., :half] * cos - a[..., half:] * sin
    array(y)[..., half:] = a[..., half:] * cos + a[..., :half] * sin
    return y


class Attention(torch.autograd.Function):
    """As flash-attn's: of (batch, time, heads, size); saves the log-sum-exp, and a random state that nobody wrote."""

    @staticmethod
    def forward(ctx, q, k, v, dropout, scale, causal, window, alibi, deterministic, grad_enabled):
        needs = grad_enabled and any(x.requires_grad for x in (q, k, v))
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1])
        rng_state = torch.empty(2, dtype=torch.int64)
        a, b, c = (array(x).transpose(0, 2, 1, 3) for x in (q, k, v))
        scores = a @ b.transpose(0, 1, 3, 2) * np.float32(scale)
        if causal:
            scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, np.float32(-1e30))
        array(lse)[...] = np.log(np.exp(scores).sum(-1))
        array(out)[...] = (np.exp(scores - array(lse)[..., None]) @ c).transpose(0, 2, 1, 3)
        if needs:
            ctx.save_for_backward(q, k, v, out, lse, rng_state)
            ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, _ = ctx.saved_tensors
        q, k, v, out, grad = (x.transpose(1, 2) for x in (q, k, v, out, grad))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, ctx.causal, scale=ctx.scale
        )
        return *(each.transpose(1, 2) for each in grads), *(None,) * 7


class LayerNorm(torch.autograd.Function):
    """As apex's, with two statistics."""

    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps):
        x = x.contiguous()
        y, mean, invvar = torch.empty_like(x), *(torch.empty(x.shape[:-1]) for _ in range(2))
        a = array(x)
        array(mean)[...] = a.mean(-1)
        array(invvar)[...] = 1 / np.sqrt(a.var(-1) + np.float32(eps))
        array(y)[...] = (a - array(mean)[..., None]) * array(invvar)[..., None] * array(weight) + array(bias)
        ctx.shape = shape
        ctx.save_for_backward(x, weight, bias, mean, invvar)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, mean, invvar = ctx.saved_tensors
        return (
            *torch.ops.aten.native_layer_norm_backward(
                grad.contiguous(), x, ctx.shape, mean[..., None], invvar[..., None], weight, bias, [True] * 3
            ),
            None,
            None,
        )


class CrossEntropy(torch.autograd.Function):
    """As Liger's fused linear one: forward makes the gradients, and saves nothing else."""

    @staticmethod
    def forward(ctx, x, weight, target):
        logits = x @ weight.t()
        loss, grad = torch.empty(len(x)), torch.empty_like(logits)
        a, rows = array(logits), np.arange(len(x))
        p = np.exp(a - a.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        array(loss)[...] = -np.log(p[rows, array(target)])
        p[rows, array(target)] -= 1
        array(grad)[...] = p / len(x)
        ctx.save_for_backward(grad @ weight, grad.t() @ x)
        return loss.mean()

    @staticmethod
    def backward(ctx, grad):
        of_x, of_weight = ctx.saved_tensors
        return of_x * grad, of_weight * grad, None


class Block(nn.Module):
    """A LLaMA block. `is_opaque`: of the Functions above; otherwise of torch's operators."""

    def __init__(self, width=64, heads=4, is_opaque=True, rope=Rope, time=128):
        super().__init__()
        self.heads, self.is_opaque, self.rope = heads, is_opaque, rope
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        inner = width * 8 // 3 // 8 * 8
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        size = width // heads
        angles = torch.arange(time)[:, None] / 1e4 ** (torch.arange(size // 2) * 2 / size)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def norm(self, x, number):
        if self.is_opaque:
            return RMSNorm.apply(x, self.norms[number], 1e-6)
        return F.rms_norm(x, x.shape[-1:], self.norms[number], 1e-6)

    def attention(self, x):
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        if self.is_opaque:
            q, k = self.rope.apply(q, k, cos, sin)
            out = Attention.apply(q, k, v, 0.0, q.shape[-1] ** -0.5, True, (-1, -1), None, False, True)
        else:
            q, k = (_plainly_turned(t, cos[:, None], sin[:, None]) for t in (q, k))
            out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
            out = out.transpose(1, 2)
        return self.o(out.flatten(-2))

    def forward(self, x):
        x = x + self.attention(self.norm(x, 0))
        y = self.norm(x, 1)
        gate, up = self.gate(y), self.up(y)
        return x + self.down(SwiGLU.apply(gate, up) if self.is_opaque else F.silu(gate) * up)


def _plainly_turned(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
