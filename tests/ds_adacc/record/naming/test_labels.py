"""Values are called what the user would call them, and the names change nothing else."""

import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import zoo
from recorded import call_of, record
from torch import nn

from ds_adacc.python_state.reading import read
from ds_adacc.record.capture import capture


def labels(recording):
    """The labels of what autograd saves, in the order of the values."""
    return [recording.values[index].label for index in sorted(recording.saved)]


class Nested(nn.Module):
    """A block whose attention and MLP are modules of their own, as most models have it."""

    def __init__(self, width=zoo.WIDTH):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), zoo.RMSNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, hidden_states, *, mask):
        x = hidden_states + self.attention(self.norm1(hidden_states), mask)
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.projection(y.transpose(1, 2).flatten(2))


def nested():
    return Nested(), (torch.randn(2, 9, zoo.WIDTH, requires_grad=True),), {"mask": torch.zeros(9, 9)}


def test_values_of_a_gpt_block_have_their_modules_names():
    assert labels(record(*zoo.example("gpt"))) == [
        "input x",
        "ln1 out",
        "ln1 mean",
        "ln1 rstd",
        "qkv out",
        "attention out",
        "attention logsumexp",
        "drop mask",
        "add",
        "ln2 out",
        "ln2 mean",
        "ln2 rstd",
        "fc1 out",
        "gelu",
    ]


def test_modules_within_modules_go_by_their_paths():
    found = labels(record(*nested()))
    assert found[:7] == [
        "input hidden_states",
        "input mask",
        "norm1 out",
        "norm1 mean",
        "norm1 rstd",
        "attention.qkv out",
        "attention out",
    ]
    assert {"attention logsumexp", "norm2 rsqrt", "norm2 out", "mlp.0 out", "mlp.1 out"} <= set(found)


def test_a_closure_without_modules_has_the_operators_names():
    def block(x, pair):
        return F.layer_norm((x * pair[1]).tanh() + pair[0].exp(), (zoo.WIDTH,)).sigmoid()

    x, a, b = (torch.randn(9, zoo.WIDTH, requires_grad=True) for _ in range(3))
    assert labels(record(block, (x, (a, b)), {})) == [
        "input x",
        "input pair[1]",
        "tanh",
        "exp",
        "add",
        "layer_norm mean",
        "layer_norm rstd",
        "sigmoid",
    ]


def test_arguments_without_names_are_counted():
    def block(*tensors):
        return tensors[0] * tensors[1]

    x, y = (torch.randn(9, requires_grad=True) for _ in range(2))
    assert labels(record(block, (x, y), {})) == ["input 0", "input 1"]


def test_layers_of_a_closure_go_without_what_their_paths_have_in_common():
    layers = nn.ModuleDict({"decoder": nn.ModuleList([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)])})

    def custom(start, end):
        def run(x):
            for layer in layers["decoder"][start:end]:
                x = layer(x)
            return x

        return run

    recording = record(custom(1, 3), (torch.randn(4, 8, requires_grad=True),), {})
    assert labels(recording) == ["1 out"]


def test_a_module_called_twice_has_labels_that_differ():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(8, 8), nn.Tanh()

        def forward(self, x):
            return self.act(self.fc(self.act(self.fc(x))))

    assert labels(record(Twice(), (torch.randn(4, 8, requires_grad=True),), {})) == ["input x", "act out", "act out 2"]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_value_has_a_label_of_its_own(name):
    found = [value.label for value in record(*zoo.example(name)).values]
    assert all(found) and len(set(found)) == len(found)


def test_labels_leave_the_digest_alone():
    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)

        def forward(self, states):
            return self.third(self.second(self.first(states)))

    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    one = record(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), (x,), {})
    other = record(Renamed(), (x,), {})
    assert labels(one) == ["input input", "1 out"]
    assert labels(other) == ["input states", "second out"]
    assert one.digest == other.digest


def global_hooks():
    module = torch.nn.modules.module
    return [
        dict(hooks or {}) for name, hooks in vars(module).items() if "_hooks" in name and name.startswith("_global")
    ]


def own_guards(block):
    """The guards of the block itself: what the test notes down is in the closure of its class."""
    return {name: mark for name, mark in read([block], (), (), {}, None)[0].marks.items() if name.startswith("block")}


@pytest.mark.parametrize("raises", [False, True])
def test_a_recording_leaves_no_hook_behind(raises):
    block, args, kwargs = nested()
    seen = []

    class Failing(nn.Module):
        def forward(self, x):
            seen.append((own_guards(block), global_hooks()))
            if raises:
                raise ValueError("out of luck")
            return x

    block.norm2 = Failing()
    before = own_guards(block), global_hooks()

    def run():
        return capture("block", call_of(block, *args, **kwargs))

    if raises:
        with pytest.raises(ValueError, match="out of luck"):
            run()
    else:
        run()
    assert [*seen, (own_guards(block), global_hooks())] == [before, before]


def test_a_recording_keeps_no_call_of_the_block_alive(uncollected):
    class Local:
        pass

    alive = []

    def block(x):
        local = Local()
        alive.append(weakref.ref(local))
        return (x * 2).tanh()

    record(block, (torch.randn(4, 8, requires_grad=True),), {})
    assert alive[0]() is None


def test_the_example_s_block(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    for name in ("train", "memory"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import train

    x = torch.randn(2, 9, 32, requires_grad=True)
    found = labels(record(train.Block(32, 4, 0.0), (x,), {}))
    expected = {"input x", "norm1 out", "norm1 mean", "attention.qkv out", "attention out", "attention logsumexp"}
    assert {*expected, "add", "norm2 rstd", "mlp.0 out", "mlp.1 out"} <= set(found)
