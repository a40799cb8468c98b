"""Templates of the statements that random blocks are made of: each writes one line of Python for tensors at hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

EXPRESSIONS, STATEMENTS = {}, {}


class Skip(Exception):
    """No tensor at hand suits the template."""


class Squared(torch.autograd.Function):
    """Saves its input twice, and its output."""

    @staticmethod
    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward(x, y, x)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y, _ = ctx.saved_tensors
        return grad * 2 * x + 0 * y


class Hidden(torch.autograd.Function):
    """A kernel that the dispatcher does not see, with two outputs, of which one has no gradient."""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        y.numpy()[...] = x.detach().numpy() * 3
        ctx.save_for_backward(y)
        sign = y > 0
        ctx.mark_non_differentiable(sign)
        return y, sign

    @staticmethod
    def backward(ctx, grad, _):
        (y,) = ctx.saved_tensors
        return grad * 3 + 0 * y


NAMESPACE = {"torch": torch, "F": F, "Squared": Squared, "Hidden": Hidden}


def expression(function):
    EXPRESSIONS[function.__name__] = function
    return function


def statement(function):
    STATEMENTS[function.__name__] = function
    return function


def floating(t):
    return t.is_floating_point()


def single(t):
    return t.dtype is torch.float32


def last(t):
    return t.dim() > 0


def rows(t):
    return t.dim() > 1


def cube(t):
    return t.dim() == 3


def filled(t):
    return t.numel() > 0


def _texts(**templates):
    """Templates that read one floating-point tensor {x} and have no numbers to draw."""
    for name, (text, *tests) in templates.items():
        EXPRESSIONS[name] = lambda w, text=text, tests=tests: text.format(x=w.pick(floating, *tests))


_texts(
    gelu=("F.gelu({x})",),
    silu=("F.silu({x})",),
    relu=("F.relu({x})",),
    tanh=("torch.tanh({x})",),
    sigmoid=("{x}.sigmoid()",),
    exp=("({x} * 0.1).exp()",),
    square=("{x} ** 2",),
    root=("({x}.abs() + 1).sqrt()",),
    clamp=("{x}.clamp(-0.5, 0.5)",),
    scaled=("{x} * 0.5 + 1",),
    softmax=("{x}.softmax(-1)", last),
    log_softmax=("F.log_softmax({x}, -1)", last),
    mean=("{x}.mean(-1, keepdim=True)", last),
    variance=("{x}.var(-1, keepdim=True)", last),
    total=("{x}.sum(0)", last),
    norm=("{x} / ({x}.norm(dim=-1, keepdim=True) + 1)", last),
    cumsum=("{x}.cumsum(-1)", last),
    sort=("{x}.sort(-1)", last),
    argsort=("{x}.gather(-1, {x}.argsort(-1))", last),
    maximum=("{x}.max(-1)", last, filled),
    clone=("{x}.clone()",),
    contiguous=("{x}.contiguous()",),
    detach=("{x}.detach()",),
    zeros=("torch.zeros_like({x})",),
    unfilled=("torch.empty_like({x}).copy_({x})",),
    flip=("{x}.flip(0)", last),
    transpose=("{x}.transpose(0, -1)", rows),
    flatten=("{x}.reshape(-1)",),
    unsqueeze=("{x}.unsqueeze(0)",),
    expand=("{x}.unsqueeze(0).expand(2, *{x}.shape)",),
    diagonal=("{x}.diagonal(0, -2, -1)", rows),
    part=("{x}[..., 1:]", last),
    stride=("{x}[..., ::2]", last),
    complex_view=("torch.view_as_real(torch.fft.rfft({x})).flatten(-2)", last, single, filled),
    bfloat=("{x}.bfloat16()",),
    double=("{x}.double()",),
    single=("{x}.float()",),
    squared_function=("Squared.apply({x})",),
    hidden_function=("Hidden.apply({x})", single),
    compared=("{x} > 0",),
    chosen=("torch.where({x} > 0, {x}, {x} * 0.1)",),
    bernoulli=("{x} * torch.rand_like({x}).round()",),
    dropped=("F.dropout({x}, 0.4)",),
    dropped_in_place=("F.dropout({x} * 1, 0.4, True, True)",),
    relu_in_place=("F.relu({x} * 1, inplace=True)",),
    attention_like=("({x} @ {x}.transpose(-1, -2)).softmax(-1) @ {x}", rows),
    positive=("{x}[{x} > 0].sum()",),
    items=("{x} * float({x}.detach().sum() > 0)",),
    branch=("{x}.tanh() * {x} if {x}.sum().item() > 0 else {x} * {x}.sigmoid()",),
    other_branch=("{x} * 2 if bool({x}.sum() < 0) else ({x} * {x}).tanh()",),
    recast=("({x} * 2).to(torch.float64).to({x}.dtype)",),
    roll=("torch.roll({x}, 1, 0)", last),
    repeat=("{x}.repeat_interleave(2, 0)", last),
    interpolated=("F.interpolate({x}, scale_factor=2.0)", cube, single, filled),
    pooled=("F.avg_pool1d({x}, 1)", cube, single, filled),
)


@expression
def linear(w):
    x = w.pick(floating, last)
    weight = w.parameter(w.lot.choice([1, 4, 8]), w[x].shape[-1], like=w[x])
    bias = w.parameter(w.block.get_parameter(weight[5:]).shape[0], like=w[x]) if w.lot.random() < 0.6 else None
    return f"F.linear({x}, {weight}, {bias})"


@expression
def tied_linear(w):
    """Its weight read twice, once transposed."""
    x = w.pick(floating, last)
    width = w[x].shape[-1]
    weight = w.parameter(width, width, like=w[x])
    return f"F.linear({x}, {weight}) @ {weight}"


@expression
def linear_module(w):
    x = w.pick(single, last)
    width = w[x].shape[-1]
    return f"{w.module(nn.Linear(width, width))}({x})" if width else "None"


@expression
def einsum(w):
    x = w.pick(floating, last)
    return f"torch.einsum('...i,ji->...j', {x}, {w.parameter(4, w[x].shape[-1], like=w[x])})"


@expression
def matmul(w):
    x = w.pick(floating, rows)
    y = w.alike(x)
    return f"{x} @ {y}.transpose(-1, -2)"


@expression
def conv1d(w):
    x = w.pick(single, cube, filled)
    return f"F.conv1d({x}, {w.parameter(3, w[x].shape[1], 3)}, padding=1)"


@expression
def layernorm(w):
    x = w.pick(floating, last, filled)
    width = w[x].shape[-1]
    weight, bias = (w.parameter(width, like=w[x]) for _ in range(2))
    return f"F.layer_norm({x}, ({width},), {weight}, {bias})"


@expression
def rmsnorm(w):
    x = w.pick(floating, last, filled)
    width = w[x].shape[-1]
    return f"F.rms_norm({x}, ({width},), {w.parameter(width, like=w[x])})"


@expression
def batchnorm(w):
    x = w.pick(single, rows, filled)
    shape = w[x].shape
    if shape[0] * shape[2:].numel() < 2 or len(shape) > 3:
        raise Skip
    return f"{w.module(nn.BatchNorm1d(shape[1]))}({x})"


@expression
def dropout_module(w):
    return f"{w.module(nn.Dropout(0.3))}({w.pick(floating)})"


@expression
def sdpa(w):
    x = w.pick(floating, cube, filled)
    y, z, causal = w.alike(x), w.alike(x), w.lot.random() < 0.5
    q, k, v = (f"{name}.unsqueeze(1)" for name in (x, y, z))
    return f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={causal}).squeeze(1)"


@expression
def fused_sdpa(w):
    """Three views of one projection."""
    x = w.pick(single, cube, filled)
    weight = w.parameter(3 * 4, w[x].shape[-1])
    heads = "F.linear({}, {}).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)"
    return f"F.scaled_dot_product_attention(*{heads.format(x, weight)}).transpose(1, 2).flatten(-2)"


@expression
def embedding(w):
    index = w.pick(lambda t: t.dtype is torch.int64)
    return f"F.embedding({index}.abs() % 5, {w.parameter(5, 4)})"


@expression
def index_select(w):
    x = w.pick(floating, last, filled)
    index = w.pick(lambda t: t.dtype is torch.int64)
    return f"{x}.index_select(0, {index}.reshape(-1).abs() % {w[x].shape[0]})"


@expression
def advanced_index(w):
    x = w.pick(floating, last, filled)
    index = w.pick(lambda t: t.dtype is torch.int64)
    return f"{x}[{index}.abs() % {w[x].shape[0]}]"


@expression
def masked_fill(w):
    x = w.pick(floating)
    mask = w.pick(lambda t: t.dtype is torch.bool and t.shape == w[x].shape)
    fill = w.lot.choice(["0.5", "-1e9", "-torch.inf"])
    return f"{x}.masked_fill({mask}, {fill})"


@expression
def added(w):
    x = w.pick(floating)
    return f"{x} + {w.alike(x)}"


@expression
def residual(w):
    x = w.pick(floating, last)
    width = w[x].shape[-1]
    return f"{x} + F.linear({x}, {w.parameter(width, width, like=w[x])})"


@expression
def multiplied(w):
    x = w.pick(floating)
    return f"{x} * {w.alike(x)}"


@expression
def divided(w):
    x = w.pick(floating)
    return f"{x} / ({w.alike(x)}.abs() + 1)"


@expression
def mixed(w):
    return f"{w.pick(floating)}.mean() * {w.pick(floating)}"


@expression
def scaled_by_parameter(w):
    x = w.pick(floating, last)
    return f"{x} * {w.parameter(w[x].shape[-1])}"


@expression
def parameter_view(w):
    """A saved view of a parameter."""
    x = w.pick(floating, last)
    return f"{x} * {w.parameter(2, w[x].shape[-1], like=w[x])}[1]"


@expression
def buffer(w):
    x = w.pick(floating, last)
    return f"({x} * {w.buffer(w[x].shape[-1])}).to({x}.dtype)"


@expression
def concatenated(w):
    x = w.pick(floating, last)
    return f"torch.cat(({x}, {w.alike(x)}, {x}), {w.lot.choice([0, -1])})"


@expression
def stacked(w):
    x = w.pick(floating)
    return f"torch.stack(({x}, {w.alike(x)}), 0)"


@expression
def chunked(w):
    return f"{w.pick(floating, last, filled)}.chunk(2, -1)"


@expression
def split(w):
    return f"{w.pick(floating, last, filled)}.split(1, 0)[:2]"


@expression
def viewed(w):
    x = w.pick(lambda t: floating(t) and rows(t) and t.is_contiguous())
    return f"{x}.view({w[x].shape[0]}, {w[x].shape[1:].numel()})"


@expression
def permuted(w):
    x = w.pick(floating, rows)
    order = list(range(w[x].dim()))
    w.lot.shuffle(order)
    return f"{x}.permute({order})"


@expression
def topk(w):
    x = w.pick(floating, last, filled)
    return f"{x}.topk({w.lot.randint(1, w[x].shape[-1])}, -1)"


@expression
def scattered(w):
    x = w.pick(floating, last, filled)
    return f"torch.zeros_like({x}).scatter_add(-1, {x}.argsort(-1), {x})"


@expression
def without_grad(w):
    x = w.pick(floating)
    name = w.new_name()
    w.run(f"with torch.no_grad():\n    {name} = torch.tanh({x}) + {w.alike(x)}")
    return f"{x} * {name}"


@expression
def switched_autocast(w):
    x = w.pick(single, last)
    name, weight = w.new_name(), w.parameter(4, w[x].shape[-1])
    w.run(f"with torch.autocast('cpu', dtype=torch.bfloat16):\n    {name} = F.linear({x}, {weight})")
    return f"{name}.float()"


@expression
def looped(w):
    """The same operators several times over."""
    x = w.pick(floating, last)
    width = w[x].shape[-1]
    weight, name = w.parameter(width, width, like=w[x]), w.new_name()
    w.run(f"{name} = {x}\nfor _ in range(3):\n    {name} = torch.tanh(F.linear({name}, {weight}) + {x})")
    return f"{name} * 2"


@statement
def add_in_place(w):
    x = w.pick(floating)
    return f"{x}.add_({w.alike(x)})"


@statement
def multiply_in_place(w):
    return f"{w.pick(floating)}.mul_({w.lot.choice([0.5, -2.0])})"


@statement
def write_to_a_view(w):
    x = w.pick(floating, last, filled)
    return f"{x}[..., {w.lot.randint(0, w[x].shape[-1] - 1)}].mul_(0.5)"


@statement
def write_to_a_transpose(w):
    return f"{w.pick(floating, rows)}.transpose(0, 1).add_(0.25)"


@statement
def assign_part(w):
    x = w.pick(floating, last)
    return f"{x}[..., :2] = {w.alike(x)}[..., :2] * 2"


@statement
def fill_masked(w):
    x = w.pick(floating)
    return f"{x}.masked_fill_({x} > 1, 0.5)"


@statement
def activate_in_place(w):
    return f"{w.lot.choice(['torch.tanh_', 'F.relu_', 'torch.sigmoid_'])}({w.pick(floating)})"


@statement
def write_before_use(w):
    """In place on a fresh tensor that nothing has saved, as users write it."""
    x = w.pick(floating)
    return f"{w.new_name()} = ({x} + 1).mul_(0.5).add_({x})"


@statement
def fill_fresh(w):
    x, name = w.pick(floating, last), w.new_name()
    return f"{name} = torch.zeros_like({x})\n{name}[..., 1:] = {x}[..., :-1]"


@statement
def detached_write(w):
    """Behind autograd's back where nothing has been saved yet."""
    x, name = w.pick(floating), w.new_name()
    return f"{name} = {x} * 1\n{name}.detach().mul_(0.5)"
