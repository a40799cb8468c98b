"""No lossy codec holds what a mask may fill with huge numbers later, though it hid nothing in the recorded call."""

import math

import pytest
import torch
import torch.nn.functional as F
from recorded import record
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc
from ds_adacc.record.naming.extremes import may_become_extreme
from ds_adacc.record.replayable.uninitialised import PATTERNS
from ds_adacc.runtime.runtime import Runtime

WIDTH, TIME = 64, 48


def extreme(program, *inputs):
    """The operators whose results may come to hold Inf or a huge number."""
    recording = record(program, inputs, {})
    found = sorted(may_become_extreme(recording, ()))
    return [recording.ops[recording.values[index].producer].short_name for index in found]


def hidden(x):
    return torch.zeros(x.shape, dtype=torch.bool)


def attention(x):
    mask = torch.zeros(8, 8).masked_fill(torch.zeros(8, 8, dtype=torch.bool), -math.inf)
    q = x.view(1, 1, 8, 8)
    return F.scaled_dot_product_attention(q, q, q, mask).sin()


def sigmoid_of_a_part(x):
    scores = x.masked_fill(hidden(x), -math.inf)
    scores[..., :4].sigmoid_()
    return scores.logsumexp(-1)


def chosen_by_masked(x):
    return x.sin().gather(-1, x.masked_fill(hidden(x), -math.inf).topk(2)[1])


MASKED = {
    "filled": (lambda x: x.masked_fill(hidden(x), -math.inf).logsumexp(-1), ["masked_fill", "logsumexp"]),
    "chosen": (lambda x: torch.where(hidden(x), -math.inf, x).logsumexp(-1), ["scalar_tensor", "where", "logsumexp"]),
    "filled in place": (
        lambda x: (x * 2).masked_fill_(hidden(x), -math.inf).logsumexp(-1),
        ["masked_fill_", "logsumexp"],
    ),
    "scaled and cast": (
        lambda x: (x.masked_fill(hidden(x), -math.inf) * 2).double().logsumexp(-1),
        ["masked_fill", "mul", "_to_copy", "logsumexp"],
    ),
    "of logarithms": (lambda x: x.masked_fill(hidden(x), -math.inf).log_softmax(-1), ["masked_fill", "_log_softmax"]),
    "filled with a huge number": (
        lambda x: x.masked_fill(hidden(x), torch.finfo(x.dtype).min).amax(-1),
        ["masked_fill", "amax"],
    ),
    "filled with a small number": (lambda x: x.masked_fill(hidden(x), -100.0).logsumexp(-1), []),
    "computed with a huge number": (lambda x: (1e4 ** x.tanh()).cos() * x, []),
    "before a softmax": (lambda x: x.masked_fill(hidden(x), -math.inf).softmax(-1) @ x.mT, ["masked_fill"]),
    "before an exponential": (lambda x: x.masked_fill(hidden(x), -math.inf).exp() @ x.mT, ["masked_fill"]),
    "before a sigmoid of a part": (sigmoid_of_a_part, ["masked_fill", "sigmoid_", "logsumexp"]),
    "before bounds": (lambda x: x.masked_fill(hidden(x), -math.inf).clamp(-9.0, 9.0).logsumexp(-1), ["masked_fill"]),
    "before an upper bound": (
        lambda x: x.masked_fill(hidden(x), -math.inf).clamp(max=9.0).logsumexp(-1),
        ["masked_fill", "clamp", "logsumexp"],
    ),
    "before a huge bound": (
        lambda x: x.masked_fill(hidden(x), -math.inf).clamp(min=-1e9).logsumexp(-1),
        ["masked_fill", "clamp", "logsumexp"],
    ),
    "in attention": (attention, ["masked_fill"]),
    "before indices": (chosen_by_masked, ["masked_fill", "topk"]),
}


@pytest.mark.parametrize("name", MASKED)
def test_it_is_read_off_the_operators(name):
    program, expected = MASKED[name]
    assert extreme(program, torch.randn(8, 8, requires_grad=True)) == expected


def half_filled(x):
    made = x.new_empty(16, 8)
    made[::2] = x.sin()
    return made.cos()[::2]


def filled_in_halves(x):
    made = x.new_empty(16, 8)
    made[::2] = x.sin()
    made[1::2] = x.cos()
    return made.cos()[::2]


def filled_by_an_operator(x):
    with torch.no_grad():
        noise = torch.mul(x, 2.0, out=torch.empty_like(x))
    return (x * noise).sin()


FRESH = {
    "half filled": (half_filled, ["empty_strided", "copy_", "cos"]),
    "filled in halves": (filled_in_halves, ["empty_strided", "copy_"]),
    "filled by an operator": (filled_by_an_operator, ["empty_strided"]),
    "filled by draws": (lambda x: F.dropout(x.sin(), 0.5).cos(), ["empty_strided"]),
    "filled and changed": (lambda x: (x.new_empty(8, 8).zero_().add_(1) * x).sin(), ["empty_strided"]),
    "changed before it is filled": (
        lambda x: (x.new_empty(8, 8).add_(1) * x).sin(),
        ["empty_strided", "add_", "mul", "sin"],
    ),
}


@pytest.mark.parametrize("name", FRESH)
def test_memory_that_nothing_has_written_to(name):
    program, expected = FRESH[name]
    assert extreme(program, torch.randn(8, 8, requires_grad=True)) == expected


@torch.library.custom_op("test_extremes::spread", mutates_args=())
def spread(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty(2 * len(x), *x.shape[1:])
    made[::2] = x.tanh()
    return made


spread.register_autograd(
    lambda ctx, grad: grad[::2] * (1 - ctx.saved_tensors[0][::2] ** 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        made = torch.empty(2 * len(x), *x.shape[1:])
        made[::2] = x.tanh()
        ctx.save_for_backward(made)
        return made[::2].clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0][::2] ** 2)


def leave(byte):
    """Leave this in the memory from which the next tensors of 64 x 64 are taken."""
    memory = [torch.full((64 * 64 * 4,), byte, dtype=torch.uint8) for _ in range(8)]
    del memory


def test_what_a_block_fills_in_part_is_not_replayed_by_luck():
    """On a CPU, the system gives memory of this size anew, with zeros in it: the replay finds them, too."""

    def program(x):
        made = torch.empty(1 << 17, 64)
        made[::2] = x
        return made.cos()[::2]

    recording = record(program, (torch.randn(1 << 16, 64, requires_grad=True),), {})
    refusals = {op.short_name: op.refusal for op in recording.ops}
    assert refusals["copy_"] == "its replay gives other bits" and refusals["cos"] is None


@pytest.mark.parametrize("apply", [lambda x: spread(x)[::2], Spread.apply], ids=["operator", "Function"])
@pytest.mark.parametrize("left", [0, *PATTERNS, 0xFF])
def test_what_a_kernel_writes_in_part_is_replayed_and_never_compressed_with_loss(apply, left):
    """Whatever is left in the memory: also what an earlier replay has put there."""
    x = torch.randn(32, 64, requires_grad=True)
    leave(left)
    recording = record(lambda x: apply(x * 2).sin(), (x,), {})
    assert [op.refusal for op in recording.ops] == [None] * 3
    saved = {
        recording.ops[value.producer].short_name: value.moderate
        for value in recording.values
        if value.producer == 1 and value.index in recording.saved
    }
    assert saved and not any(saved.values())


def test_what_holds_inf_already_may_bring_it_elsewhere():
    bias = torch.zeros(8, 8)
    bias[0, 0] = -math.inf
    x = torch.randn(8, 8, requires_grad=True)
    recording = record(lambda x: torch.where(x > 100, bias, x).logsumexp(-1), (x,), {})
    moderate = {value.label: value.moderate for value in recording.values if value.index in recording.saved}
    assert moderate == {"mask": True, "where": False, "logsumexp": False}


class Attention(nn.Module):
    """Its softmax is written with logsumexp, which saves the masked scores. Their gradient is finite."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, is_padding):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(is_padding[:, None], -math.inf)
        return x + self.out((scores - scores.logsumexp(-1, keepdim=True)).exp() @ v)


REST = torch.zeros(1)  # what is in the memory that `padded` does not write


@torch.library.custom_op("test_extremes::padded", mutates_args=())
def padded(x: torch.Tensor) -> torch.Tensor:
    """The sine, in rows that are four elements longer, as kernels pad them."""
    made = REST.item() + torch.zeros(*x.shape[:-1], x.shape[-1] + 4)
    made[..., :-4] = x.sin()
    return made[..., :-4]


@padded.register_fake
def _(x):
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 4)[..., :-4]


padded.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Padded(nn.Module):
    """A compiled graph that saves a part of a memory, and the query, the key and the value, which are all of one."""

    def __init__(self):
        super().__init__()
        self.qkv, self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.last(padded(self.first(q.sin() * k.sin() + v.sin())).sin())


@pytest.fixture
def compiled_padded():
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = nn.ModuleList(Padded() for _ in range(3))
    for block in blocks:
        block.compile(backend="aot_eager")
    yield blocks
    REST.zero_()


def test_what_a_graph_saves_only_a_part_of(compiled_padded):
    recording = record(compiled_padded[0], (torch.randn(2, 8, WIDTH, requires_grad=True),), {})
    size = 2 * 8 * WIDTH * 4
    moderate = {value.nbytes: value.moderate for value in recording.values if value.index in recording.saved}
    assert moderate == {size: True, 3 * size: True, size + 2 * 8 * 4 * 4: False}


@pytest.mark.usefixtures("slow_replays")
@pytest.mark.parametrize("rest", [math.nan, 1e9])
def test_memory_that_a_graph_never_writes_does_no_harm(compiled_padded, rest):
    section = {"memory_budget": 0.6, "max_gradient_error": None, "rectifier": {"enabled": False}}
    runtime = Runtime(load({"adacc": section}), has_engine=True)
    adacc, found = Adacc(runtime), []
    for step in range(5):
        torch.manual_seed(0)
        REST.fill_(rest if step == 4 else 0.0)
        hidden = torch.randn(4, TIME, WIDTH, requires_grad=True)
        for block in compiled_padded:
            hidden = runtime.checkpoint(block, hidden)
        compiled_padded.zero_grad()
        hidden.square().sum().backward()
        found.append([parameter.grad for parameter in compiled_padded.parameters()])
        adacc.end_step()
    assert any(not torch.equal(*pair) for pair in zip(found[0], found[3], strict=True)), "a codec is in force"
    assert all(torch.equal(*pair) for pair in zip(found[3], found[4], strict=True))


@pytest.mark.usefixtures("slow_replays")
def test_gradients_are_finite_in_the_first_padded_batch():
    config = load({"adacc": {"memory_budget": 0.6, "codecs": {"other": "group"}, "max_gradient_error": None}})
    runtime = Runtime(config, has_engine=True)
    adacc = Adacc(runtime)
    torch.manual_seed(0)
    blocks = nn.ModuleList(Attention() for _ in range(3))
    for step in range(6):
        torch.manual_seed(step)
        hidden, is_padding = torch.randn(4, TIME, WIDTH, requires_grad=True), torch.zeros(4, TIME, dtype=torch.bool)
        is_padding[:, 40:] = step == 5
        for block in blocks:
            hidden = runtime.checkpoint(block, hidden, is_padding)
        hidden.square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in blocks.parameters()), step
        adacc.end_step()
    (policies,) = runtime.controller.plan.policies.values()
    assert any("group" in policy.stores for policy in policies)
