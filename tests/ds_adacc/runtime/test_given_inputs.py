"""What several calls of one forward are given, as decoder blocks the states of an encoder, counts once."""

import gc

import pytest
import torch
import torch.nn.functional as F
import zoo
from stack import ALLOWANCE
from storages import Storages
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.profile.memory_trace import MemoryTrace
from ds_adacc.runtime.runtime import Runtime

WIDTH, LAYERS, BATCH, TIME, STATES = 64, 6, 4, 128, 512


class CrossAttention(nn.Module):
    """Reads the states in every layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.q = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, states):
        k, v = self.kv(states).chunk(2, -1)
        found = F.scaled_dot_product_attention(self.q(self.norm(x))[:, None], k[:, None], v[:, None])
        return x + self.out(found[:, 0])


class Decoder:
    """The blocks' gradients exist before, so that only activations are counted."""

    def __init__(self):
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(CrossAttention() for _ in range(LAYERS))
        self.x, self.states = (torch.randn(BATCH, time, WIDTH, requires_grad=True) for time in (TIME, STATES))
        for tensor in (*self.blocks.parameters(), self.x, self.states):
            tensor.grad = torch.zeros_like(tensor)

    def step(self, call):
        hidden, states = self.x * 1.0, self.states * 1.0
        for block in self.blocks:
            hidden = call(block, hidden, states)
        loss = (hidden * 0.1).sum()
        del hidden, states
        loss.backward()
        return loss.detach()

    def peak(self, call):
        gc.collect()
        with Storages() as storages:
            self.step(call)
        return storages.peak


def runtime(**section):
    return Runtime(load({"adacc": {"rectifier": {"enabled": False}, **section}}))


def trained(model, budget):
    """Its runtime after six steps without codecs, and how far measured peaks are from the predicted ones."""
    runs = runtime(codecs="none", memory_budget=budget)
    for _ in range(6):
        model.step(runs.checkpoint)
    plan, seen = runs.controller.plan, runs.controller.observation
    assert seen.held.planned == seen.held.observed
    with_it, without = model.peak(runs.checkpoint), model.peak(lambda block, *args: block(*args))
    return runs, (abs(with_it - plan.peak), abs(without - plan.without))


@pytest.mark.parametrize("budget", [0.5, 0.7])
def test_the_states_count_once(budget):
    _, misses = trained(Decoder(), budget)
    of_states = BATCH * STATES * WIDTH * 4
    assert max(misses) < of_states / 2, "not a single copy of them too much or too little"


def test_no_bits_differ():
    model, runs = Decoder(), runtime(codecs="none", memory_budget=0.5)
    expected = model.step(lambda block, *args: block(*args)), [p.grad.clone() for p in model.blocks.parameters()]
    for _ in range(4):
        model.blocks.zero_grad()
        loss = model.step(runs.checkpoint)
        assert torch.equal(loss, expected[0])
        zoo.assert_same([p.grad for p in model.blocks.parameters()], expected[1])


def test_nobody_compresses_what_the_others_hold():
    """A payload of its own would only add to it."""
    model, runs = Decoder(), runtime(codecs="quantization", memory_budget=0.7)
    for _ in range(3):
        model.step(runs.checkpoint)
    first, others = sorted(runs.controller.plan.block_types, key=lambda each: each.count)
    assert (first.count, others.count) == (1, LAYERS - 1)
    for block_type in (first, others):
        recording = runs.agreement.known_types[block_type.name].recording
        hidden, states = (value.index for value in recording.values if value.origin == "input")
        (policy,) = set(runs.controller.plan.policies[block_type.name])
        assert policy.stores[states] == planner.RETAIN
        assert planner.is_codec(policy.stores[hidden])
        assert recording.values[states].owned is (block_type is first)


class Biased(nn.Module):
    """Attention whose scores get a bias, as in T5. Autograd saves what it makes of them, and not the bias itself."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, bias):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) + bias
        return x + self.out(scores.softmax(-1) @ v)


class Positions(Decoder):
    """The blocks share one bias."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Biased() for _ in range(LAYERS))
        self.states = torch.randn(BATCH, TIME, TIME, requires_grad=True)
        for tensor in (*self.blocks.parameters(), self.states):
            tensor.grad = torch.zeros_like(tensor)

    def resize(self, time):
        self.x, self.states = (torch.randn(BATCH, time, last, requires_grad=True) for last in (WIDTH, time))


@pytest.mark.parametrize("budget", [0.45, 0.6, 1.0])
def test_what_blocks_need_only_to_recompute_counts_once(budget):
    runs, misses = trained(Positions(), budget)
    plan, seen = runs.controller.plan, runs.controller.observation
    assert seen.peak.planned == seen.peak.observed
    assert max(misses) <= ALLOWANCE
    of_bias = BATCH * TIME * TIME * 4
    lender = next(each for each in plan.block_types if each.count == 1)
    (policy,) = plan.policies[lender.name]
    bias = runs.agreement.known_types[lender.name].recording.inputs[1].index
    assert policy.stores[bias] == (None if budget == 1 else planner.RETAIN)
    assert [each.profile.graph.carried_bytes for each in plan.block_types] == [of_bias, of_bias]


def test_held_on_the_host_each_call_has_a_copy_of_its_own():
    model, runs = Positions(), runtime(codecs="none", memory_budget=0.6)
    runs.controller.hold_inputs(InputPlacement(on_host=True))
    for _ in range(3):
        model.step(runs.checkpoint)
    (block_type,) = runs.controller.plan.block_types
    assert block_type.count == LAYERS
    assert not any(value.lent for value in block_type.profile.graph.values)


def test_where_all_retain_everything_nothing_is_lent_at_new_sizes_either():
    model, runs = Positions(), runtime(codecs="none", memory_budget=1.0)
    for time in (128, 128, 96, 112, 120):
        model.resize(time)
        model.step(runs.checkpoint)
    assert runs.recordings < 5 * LAYERS, "the last sizes are predicted"
    for known in runs.agreement.known_types.values():
        assert not any(known.profile.graph.replayed(policy.stores) for policy in known.policies)


class Scaled(nn.Module):
    """Autograd saves the bias."""

    def __init__(self):
        super().__init__()
        self.qk, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, bias):
        q, k = self.qk(x).chunk(2, -1)
        return x + self.out((q @ k.transpose(1, 2) * bias) @ x)


class SavedLater(Positions):
    """The first blocks need the bias only to recompute."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(make() for make in (Biased, Biased, Scaled, Scaled))
        for parameter in self.blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)


def test_what_a_later_block_saves_counts_without_checkpointing():
    model, runs = SavedLater(), runtime(codecs="none", memory_budget=1.0)
    for _ in range(3):
        model.step(runs.checkpoint)
    plan, held = runs.controller.plan, runs.controller.observation.held
    assert plan.peak == plan.without
    assert held.planned == held.observed
    assert model.peak(lambda block, *args: block(*args)) - plan.without <= ALLOWANCE


class Down(nn.Module):
    """Only averages what it is given: it holds nothing of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.unflatten(1, (-1, 2)).mean(2))


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, skip):
        return self.linear(torch.cat([x.repeat_interleave(2, 1), skip], -1)).relu()


class UNet(Decoder):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.ModuleList(Down() for _ in range(3)), nn.ModuleList(Up() for _ in range(3))
        for parameter in (*self.down.parameters(), *self.up.parameters()):
            parameter.grad = torch.zeros_like(parameter)

    def step(self, call):
        hidden, skips = self.states * 1.0, []
        for block in self.down:
            skips.append(hidden)
            hidden = call(block, hidden)
        for block in self.up:
            hidden = call(block, hidden, skips.pop())
        loss = (hidden * 0.1).sum()
        del hidden
        loss.backward()


class FrozenKeys(Decoder):
    """Nobody saves the states: a frozen layer's gradient needs none of its input. Yet blocks are rebuilt from them."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.kv.requires_grad_(False)


@pytest.mark.parametrize("make", [UNet, FrozenKeys, Decoder])
def test_what_the_first_call_does_not_need_counts_all_the_same(make):
    """Under the smallest budget nothing is left over that could hide a tensor which nobody has counted."""
    model = make()
    with pytest.raises(planner.InfeasibleBudget) as refusal:
        runs = runtime(codecs="none", memory_budget=1 << 20)
        for _ in range(2):
            model.step(runs.checkpoint)
    runs = runtime(codecs="none", memory_budget=refusal.value.smallest)
    for _ in range(6):
        model.step(runs.checkpoint)
    assert runs.controller.plan.peak <= refusal.value.smallest
    assert model.peak(runs.checkpoint) <= refusal.value.smallest + ALLOWANCE


def test_a_call_does_not_share_with_itself():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, residual):
            return residual + self.linear(x)

    block, runs = Residual(), runtime(codecs="quantization", memory_budget=1 << 20)
    for _ in range(3):
        hidden = torch.randn(BATCH, TIME, WIDTH, requires_grad=True) * 1.0
        runs.checkpoint(block, hidden, hidden).sum().backward()
    (known,) = runs.agreement.known_types.values()
    ((policy,),) = runs.controller.plan.policies.values()
    (saved,) = known.recording.saved
    assert planner.is_codec(policy.stores[saved])


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, gate):
        return x + self.linear(x) * gate


class Parts(Decoder):
    """Each block gets its own part of one tensor."""

    def __init__(self, shape, part):
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(LAYERS))
        self.gates, self.part = torch.randn(shape, requires_grad=True), part
        for tensor in (*self.blocks.parameters(), self.gates):
            tensor.grad = torch.zeros_like(tensor)

    def step(self, call):
        hidden, gates = self.x * 1.0, self.gates * 1.0
        for number, block in enumerate(self.blocks):
            hidden = call(block, hidden, self.part(gates, number))
        loss = (hidden * 0.1).sum()
        del hidden, gates
        loss.backward()

    def peak(self, call):
        """As the allocator has it: who looks at each tensor keeps autograd from adding up gradients in place."""
        with MemoryTrace(torch.device("cpu")) as trace:
            self.step(call)
        return trace.peak


def test_parts_of_one_tensor_count_once():
    """Each of them keeps the whole tensor alive, as in Gemma, where it has the embeddings of all layers."""
    model = Parts((BATCH, TIME, LAYERS, WIDTH), lambda gates, number: gates[:, :, number])
    runs = runtime(codecs="none", memory_budget=1.0)
    for _ in range(4):
        model.step(runs.checkpoint)
    plan, held = runs.controller.plan, runs.controller.observation.held
    beyond_the_part = (LAYERS - 1) * WIDTH * 4  # in the last row of the whole
    assert held.observed == held.planned + beyond_the_part
    of_gates = model.gates.nbytes
    assert abs(model.peak(lambda block, *args: block(*args)) - plan.without) < of_gates / 2


def test_parts_of_one_tensor_that_lie_apart_all_count():
    """Each block gets half of its own layer: the halves of different layers have no memory in common."""
    model = Parts((LAYERS, BATCH, TIME, 2 * WIDTH), lambda gates, number: gates[number, :, :, :WIDTH])
    runs = runtime(codecs="none", memory_budget=1.0)
    for _ in range(4):
        model.step(runs.checkpoint)
    held = runs.controller.observation.held
    behind_the_parts = LAYERS * WIDTH * 4  # the other half of each layer's last row
    assert held.observed == held.planned + behind_the_parts


@pytest.mark.parametrize("make", [Decoder, Positions])
def test_a_resumed_run_lends_as_the_one_before(make):
    model, runs = make(), runtime(codecs="none", memory_budget=0.6)
    for _ in range(3):
        model.step(runs.checkpoint)
    before = {name: known.profile for name, known in runs.agreement.known_types.items()}
    resumed = runtime(codecs="none", memory_budget=0.6)
    resumed.restore(runs.state())
    model.step(resumed.checkpoint)
    assert resumed.profiler.measured == 0
    assert {name: known.profile for name, known in resumed.agreement.known_types.items()} == before
