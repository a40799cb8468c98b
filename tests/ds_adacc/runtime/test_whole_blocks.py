"""Blocks that read data, called by a checkpoint: recomputed as a whole, to the bit, unless there is a reason."""

import functools
import logging
import os
import random
import types
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
import zoo
from experts import LAYERS, TOKENS, WIDTH, Experts, configured, layers, plainly, recordings, same, train
from recomputing import recomputing
from torch import nn

from ds_adacc import checkpointing
from ds_adacc.checkpointing import checkpoint
from ds_adacc.plan.budget_error import BudgetTooSmall
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import call_asked, wrap_blocks
from ds_adacc.whole_blocks.costs import WholeCosts

LOG = logging.getLogger("test")


pytestmark = pytest.mark.usefixtures("afresh")


def assert_exact_as_a_whole(kind=Experts, **options):
    """Blocks that are recomputed as a whole are trained to the bit as plain ones. `options`: of `train`."""
    plain = train(layers(kind), plainly, **options)
    runtime, blocks = configured(), layers(kind)
    assert same(train(blocks, checkpoint, **options), plain)
    assert all(each.is_whole for each in recordings(runtime))


def test_a_budget_that_no_replay_reaches_is_kept_to_the_bit():
    plain = train(layers(), plainly)
    runtime = configured()
    blocks = layers()
    assert same(train(blocks, checkpoint), plain)
    assert [each.is_whole for each in recordings(runtime)] == [True] * LAYERS
    plan, observation = runtime.controller.plan, runtime.controller.observation
    assert plan.groups[0].solution.peak <= plan.budget
    assert observation.held.observed == observation.held.planned
    assert runtime.recordings == LAYERS


def test_who_has_not_asked_is_told_how_to():
    runtime, blocks = configured(), layers()
    with pytest.raises(BudgetTooSmall, match="To have the block recomputed as a whole, call it by ds_adacc"):
        train(blocks, lambda block, x: run_unasked(runtime, block, x))
    assert not any(each.is_whole for each in recordings(runtime))


def run_unasked(runtime: Runtime, block, *args):
    return runtime.run(runtime.blocks.of(block), block, block, args, {})


def test_a_resumed_run_goes_on_with_the_plan_and_what_was_measured():
    runtime = configured()
    train(layers(), checkpoint)
    runtime.controller.state_is_saved()
    state = runtime.state()
    checkpointing.registry.reset()
    resumed = configured()
    resumed.restore(state)
    assert same(train(layers(), checkpoint), train(layers(), plainly))
    assert resumed.recordings == LAYERS
    assert resumed.controller.plan is state.plan
    (before,), (now,) = state.profiles.values(), resumed.state().profiles.values()
    assert 0 < now.op_seconds[0] <= before.op_seconds[0]
    assert now.graph == before.graph


def test_sizes_are_recorded_three_times_and_predicted_afterwards():
    sizes = (48, 40, 56, 44, 60, 36, 52)
    plain = train(layers(), plainly, sizes)
    runtime = configured()
    assert same(train(layers(), checkpoint, sizes), plain)
    assert runtime.recordings == LAYERS + 2, "at further sizes, one block is recorded"


def test_blocks_that_differ_only_after_the_read_count_with_what_the_larger_takes(monkeypatch):
    costs, cost = [], WholeCosts.of
    monkeypatch.setattr(WholeCosts, "of", lambda recording: costs.append(cost(recording)) or costs[-1])

    class Repeating(Experts):
        def __init__(self):
            super().__init__()
            self.times = 1

        def forward(self, x):
            for _ in range(self.times):
                x = self.routed(x)
            return x

    def graph(times):
        costs.clear()
        runtime = configured(memory_budget=1.0)
        blocks = layers(Repeating)
        blocks[2].times = times  # neither the first nor the last to be recorded
        train(blocks, checkpoint)
        (known,) = runtime.agreement.known_types.values()
        found = known.profile.graph
        (event,) = found.events
        assert len(costs) == LAYERS
        assert found.values[-1].nbytes == max(each.saved_bytes for each in costs)
        assert event.gradient_bytes == max(each.backward for each in costs)
        assert event.made_bytes == min(each.backward - each.arriving for each in costs)
        return found

    few, many = graph(1), graph(5)
    assert many.values[-1].nbytes > 4 * few.values[-1].nbytes
    assert many.events[0].gradient_bytes >= few.events[0].gradient_bytes
    of_largest = many.events[0].gradient_bytes - costs[0].arriving
    assert many.events[0].made_bytes < of_largest, "what is made is beside less: the least counts"


def test_the_forward_runs_once_and_once_more_in_backward(caplog):
    class Watched(Experts):
        def forward(self, x):
            LOG.info("a backward runs: %s", torch._C._current_graph_task_id() != -1)
            return self.routed(x)

    configured()
    (block,) = layers(Watched, 1)
    with caplog.at_level(logging.INFO, "test"):
        checkpoint(block, torch.randn(TOKENS, WIDTH, requires_grad=True)).sum().backward()
    assert [r.getMessage() for r in caplog.records if r.name == "test"] == [
        "a backward runs: False",
        "a backward runs: True",
    ]


# -- random numbers and what else a forward begins with


class Drawing(Experts):
    """Draws from Python's generator, NumPy's, torch's and one of its own."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(5)

    def forward(self, x):
        scale = random.random() + float(np.random.random()) + torch.rand(1, generator=self.own).item()
        return self.routed(x * scale) + torch.rand_like(x)


def test_every_random_generator_draws_the_same_twice_and_is_put_back():
    results = []
    for call in (plainly, checkpoint):
        random.seed(3)
        np.random.seed(4)
        configured()
        blocks = layers(Drawing)
        results.append((train(blocks, call), random.random(), np.random.random(), [b.own.get_state() for b in blocks]))
    (plain, *numbers, states), (ours, *our_numbers, our_states) = results
    assert same(plain, ours)
    assert numbers == our_numbers
    zoo.assert_same(states, our_states)


def test_named_states_are_put_back_too():
    class Forking(Experts):
        def forward(self, x):
            with checkpointing.get_cuda_rng_tracker().fork("experts"):
                x = nn.functional.dropout(x, 0.5)
            return self.routed(x)

    results = []
    tracker = checkpointing.get_cuda_rng_tracker()
    try:
        for call in (plainly, checkpoint):
            tracker.reset()
            torch.manual_seed(8)
            tracker.add("experts", 9)
            configured()
            results.append(train(layers(Forking), call))
        assert same(*results)
    finally:
        tracker.reset()


def test_autocast_is_as_it_was():
    def cast(call, block, x):
        with torch.autocast("cpu", torch.bfloat16):
            return call(block, x)

    assert_exact_as_a_whole(run=cast)


# -- what must not change in between


def test_an_operator_that_runs_as_another_while_it_is_recorded():
    """CTC reads lengths into C++, but not where a dispatch mode is on: there it keeps them for backward."""

    class Transcriber(Experts):
        def forward(self, x):
            y = super().forward(x)
            lengths = torch.full((1,), len(y)), torch.full((1,), 12)
            return y + nn.functional.ctc_loss(y[:, None].log_softmax(-1), torch.ones(1, 12).long(), *lengths).sin()

    runtime = recomputing()

    def asked(block, x):
        return runtime.run(runtime.blocks.of(block), block, block, (x,), {}, is_asked=True)

    blocks = layers(Transcriber)
    assert same(train(blocks, asked), train(layers(Transcriber), plainly))
    assert all(each.is_whole for each in recordings(runtime))


def test_another_number_is_an_error():
    class Scaled(Experts):
        scale = 1.0

        def forward(self, x):
            return self.routed(x) * self.scale

    configured()
    (block,) = layers(Scaled, 1)
    block.scale = 2.0
    y = checkpoint(block, torch.randn(TOKENS, WIDTH, requires_grad=True))
    block.scale = 3.0
    with pytest.raises(RuntimeError, match=r"But block.scale has changed since the first began"):
        y.sum().backward()


def test_of_the_environment_only_what_compilers_set_may_change(monkeypatch):
    """Torch compiles the backward of a loss in backward, before the blocks' second forwards."""

    class Reads(Experts):
        def forward(self, x):
            return self.routed(x) * float(os.environ.get("OF_A_BLOCK", "1"))

    def train(name):
        configured()
        (block,) = layers(Reads, 1)
        y = checkpoint(block, torch.randn(TOKENS, WIDTH, requires_grad=True))
        monkeypatch.setenv(name, "2")
        y.sum().backward()

    train("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
    train("TRITON_CACHE_DIR")
    with pytest.raises(RuntimeError, match=r"But global os.environ._data has changed since the first began"):
        train("OF_A_BLOCK")
    monkeypatch.setenv("OF_A_BLOCK", "3")
    with pytest.raises(RuntimeError, match=r"But global os.environ._data\[b'OF_A_BLOCK'\] has changed"):
        train("OF_A_BLOCK")


def test_another_number_in_an_object_among_the_arguments_is_an_error():
    class Scaled(Experts):
        def forward(self, x, options):
            return self.routed(x) * options.scale

    configured()
    (block,), options = layers(Scaled, 1), types.SimpleNamespace(scale=2.0)
    y = checkpoint(block, torch.randn(TOKENS, WIDTH, requires_grad=True), options)
    options.scale = 3.0
    with pytest.raises(RuntimeError, match=r"But argument of type SimpleNamespace \(0\).scale has changed"):
        y.sum().backward()


class Options:
    """An object that a program gives its blocks, and that is no list, tuple or dict."""

    def __init__(self, shift):
        self.shift = shift


class Shifting(Experts):
    """Adds a tensor before it routes, so that only a second forward needs it."""

    def forward(self, x, options):
        return self.routed(x + (options[0] if isinstance(options, tuple) else options.shift))


def replace_shift(options):
    options.shift = options.shift * 2


@pytest.mark.parametrize(
    ("pack", "change"),
    [
        (Options, replace_shift),
        (Options, lambda options: options.shift.mul_(2)),
        (namedtuple("OneOption", "shift"), lambda options: options.shift.mul_(2)),
    ],
    ids=["replaced", "written to", "written to in a named tuple"],
)
def test_another_tensor_in_an_object_among_the_arguments_is_an_error(pack, change):
    configured()
    (block,), options = layers(Shifting, 1), pack(torch.ones(WIDTH))
    y = checkpoint(block, torch.randn(TOKENS, WIDTH, requires_grad=True), options)
    change(options)
    with pytest.raises(RuntimeError, match=r"But argument of type \w+ \(0\)\S*shift|\(0\)\[0\] has changed"):
        y.sum().backward()


def test_a_block_that_replaces_a_tensor_in_an_object_among_the_arguments_is_not_recomputed_as_a_whole():
    class Passing(Experts):
        def forward(self, batch):
            batch.shift = self.routed(batch.shift)
            return batch.shift

    def run(call, block, x):
        return call(block, Options(x * 1))

    plain = train(layers(Passing), plainly, run=run)
    runtime, blocks = configured(memory_budget=1.0), layers(Passing)
    assert same(train(blocks, checkpoint, run=run), plain)
    reasons = [str(each.remarks) for each in recordings(runtime)]
    assert all("its forward changes argument of type Options (0).shift" in each for each in reasons)


def test_a_hook_that_runs_around_the_call_may_come_and_go():
    def call(block, x):
        handle = block.register_forward_hook(lambda *_: None)
        output = call_asked(block, x)
        handle.remove()
        return output

    plain = train(layers(), plainly)
    runtime, blocks = configured(), layers()
    wrap_blocks({f"blocks.{n}": block for n, block in enumerate(blocks)}, runtime)
    assert same(train(blocks, call), plain)
    assert [each.is_whole for each in recordings(runtime)] == [True] * LAYERS


def test_a_buffer_or_a_parameter_that_was_written_to_is_an_error():
    class Shifted(Experts):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.ones(WIDTH))

        def forward(self, x):
            return self.routed(x) + self.shift

    (block,) = layers(Shifted, 1)
    for tensor, what in ((block.shift, "a tensor that a block holds"), (block.norm.bias, "a parameter")):
        configured()
        y = checkpoint(block, torch.randn(TOKENS, WIDTH, requires_grad=True))
        with torch.no_grad():
            tensor.add_(1)
        with pytest.raises(RuntimeError, match=what):
            y.sum().backward()


def test_another_buffer_in_its_place_is_an_error():
    class Scaled(Experts):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            return self.routed(x * self.scale)

    configured()
    (block,) = layers(Scaled, 1)
    y = checkpoint(block, torch.randn(TOKENS, WIDTH, requires_grad=True))
    block.scale = torch.full((), 2.0)
    with pytest.raises(RuntimeError, match="But its tensor scale is another one than when the first began"):
        y.sum().backward()


SHIFT = {"by": torch.zeros(WIDTH)}


class ShiftedByAGlobal(Experts):
    def forward(self, x):
        return self.routed(x + SHIFT["by"])


class ShiftedIfLarge(Experts):
    """No call that was recorded has read what it adds."""

    def __init__(self):
        super().__init__()
        self.shifts = {"by": torch.ones(WIDTH)}

    def forward(self, x):
        return self.routed(x + self.shifts["by"] if x.mean().item() > 1 else x)


@pytest.mark.parametrize(("kind", "held"), [(ShiftedByAGlobal, lambda _: SHIFT), (ShiftedIfLarge, lambda b: b.shifts)])
@pytest.mark.parametrize(
    "change",
    [lambda held: held.update(by=held["by"] + 1), lambda held: held["by"].add_(1)],
    ids=["replaced", "written to"],
)
def test_another_tensor_in_a_global_or_in_what_only_later_calls_read_is_an_error(kind, held, change):
    runtime = configured()
    (block,) = layers(kind, 1)
    checkpoint(block, torch.randn(TOKENS, WIDTH, requires_grad=True))
    y = checkpoint(block, torch.randn(TOKENS, WIDTH).add(9).requires_grad_())
    assert runtime.recordings == 1
    change(held(block))
    with pytest.raises(RuntimeError, match=r"had when the first began is there no more|a tensor that a block holds"):
        y.sum().backward()


@pytest.mark.parametrize("bound", ["block", "scale", "shift"])
def test_a_function_that_finds_other_things_in_its_cells_is_an_error(bound):
    """As where a loop makes a function for each block, and its variables have gone on when backward comes."""
    configured()
    blocks = layers(count=2)
    block, scale, shift = blocks[0], 2.0, torch.zeros(WIDTH)
    y = checkpoint(lambda x: block(x * scale + shift), torch.randn(TOKENS, WIDTH, requires_grad=True))
    if bound == "block":
        block = blocks[1]
    elif bound == "scale":
        scale = 3.0
    else:
        shift = torch.ones(WIDTH)
    with pytest.raises(RuntimeError, match="began"):
        y.sum().backward()


def test_a_forward_that_counts_only_later_is_left_alone_from_then_on(caplog):
    class CountingLater(Experts):
        def forward(self, x):
            if self.counts:
                self.forwards += 1
            return self.routed(x)

    runtime = configured(memory_budget=1.0)
    (block,) = layers(CountingLater, 1)
    for counts in (False, True, True, True):
        block.counts = counts
        checkpoint(block, torch.randn(TOKENS, WIDTH, requires_grad=True)).sum().backward()
    assert block.forwards == 3
    assert not any(each.is_whole for each in recordings(runtime)[:1])


# -- arguments


def test_one_object_at_two_places_is_one_in_the_second_forward():
    class Same(Experts):
        def forward(self, x, pair, again, buffer):
            assert pair[0] is x and again is pair and buffer is self.norm.weight
            return self.routed(x) if not x.is_leaf else x

    def run(call, block, x):
        pair = [x * 2]
        return call(block, pair[0], pair, pair, block.norm.weight)

    assert_exact_as_a_whole(Same, run=run)


def test_a_partial_and_a_generator_among_the_arguments():
    class Noisy(Experts):
        def forward(self, x, options):
            return self.routed(x + torch.randn(x.shape, generator=options["generator"]))

    def run(call, block, x):
        options = {"generator": torch.Generator().manual_seed(7)}
        return call(functools.partial(block, x), options)

    plain = train(layers(Noisy), plainly, run=run)
    configured()
    assert same(train(layers(Noisy), checkpoint, run=run), plain)


Pair = namedtuple("Pair", "x scale")


@pytest.mark.parametrize("pack", [list, tuple, lambda pair: {"x": pair[0], "scale": pair[1]}, lambda pair: Pair(*pair)])
def test_the_caller_may_change_what_it_has_passed(pack):
    class Packed(Experts):
        def forward(self, packed):
            x, scale = packed.values() if isinstance(packed, dict) else packed
            return self.routed(x * scale)

    def run(call, block, x):
        packed = pack([x, torch.tensor(1.5)])
        y = call(block, packed)
        if isinstance(packed, list | dict):
            packed.clear()
        return y

    assert_exact_as_a_whole(Packed, run=run)


def test_an_argument_that_was_written_to_is_an_error():
    configured()
    x = torch.randn(TOKENS, WIDTH, requires_grad=True) * 1
    y = checkpoint(layers()[0], x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="an argument of the block"):
        y.sum().backward()


def test_a_second_forward_that_saves_other_tensors_is_an_error():
    class Growing(Experts):
        def forward(self, x):
            y = self.routed(x)
            return y * y if torch._C._current_graph_task_id() != -1 else y

    configured()
    (block,) = layers(Growing, 1)
    y = checkpoint(block, torch.randn(TOKENS, WIDTH, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"The second forward saves \d+ tensors, and the first saved \d+"):
        y.sum().backward()


# -- backward


def test_backward_may_run_again_or_in_parts():
    results = []
    for call in (plainly, checkpoint):
        configured()
        blocks = layers(dropout=0.0)
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
        y = x
        for block in blocks:
            y = call(block, y)
        found = [torch.autograd.grad(y.sum(), [x], retain_graph=True)[0]]
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        results.append([*found, x.grad, *(p.grad for p in blocks.parameters())])
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_function_that_asks_twice_for_what_it_has_saved():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            (again,) = ctx.saved_tensors
            return gradient * (x + again)

    class WithFunction(Experts):
        def forward(self, x):
            return self.routed(Twice.apply(x.tanh()))

    plain = train(layers(WithFunction), plainly)
    configured()
    assert same(train(layers(WithFunction), checkpoint), plain)


class Left:
    """What the guards of a block do not see: an object that code reaches, and that is written to only."""

    last = None


class Leaving(Experts):
    """Leaves an auxiliary loss in an attribute, which it has at its first call only from then on."""

    def forward(self, x):
        y = self.routed(x)
        self.last = y.mean()
        return y


def test_an_auxiliary_loss_in_an_attribute_stays_that_of_the_first_forward():
    results = []
    for call in (plainly, checkpoint):
        configured()
        blocks = layers(Leaving)
        found = []
        for step in range(3):
            x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
            for block in blocks:
                x = call(block, x)
            x.sum().backward(retain_graph=True)
            sum(block.last for block in blocks).backward()
            found += [p.grad.clone() for p in blocks.parameters() if p.grad is not None]
        results.append(found)
    zoo.assert_same(*results)


@pytest.mark.parametrize("take", [lambda block: setattr(block, "last", None), lambda block: delattr(block, "last")])
def test_an_auxiliary_loss_that_the_program_takes_away_stays_away(take):
    results = []
    for call in (plainly, checkpoint):
        configured()
        blocks, found = layers(Leaving), []
        for step in range(3):
            x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
            for block in blocks:
                x = call(block, x)
            loss = x.sum() + sum(block.last for block in blocks)
            for block in blocks:
                take(block)
            loss.backward()
            assert not any(getattr(block, "last", None) is not None for block in blocks)
            found += [p.grad.clone() for p in blocks.parameters() if p.grad is not None]
        results.append(found)
    zoo.assert_same(*results)


class LeavingInAGlobal(Experts):
    def forward(self, x):
        y = self.routed(x)
        LEFT["last"] = y.mean()
        return y


LEFT = {"last": torch.zeros(())}


def test_a_global_that_blocks_write_to_one_after_the_other_is_theirs():
    assert_exact_as_a_whole(LeavingInAGlobal)


def test_what_the_block_leaves_in_a_list_keeps_nothing_of_its_second_forward(uncollected):
    left = Left()

    class LeavingElsewhere(Experts):
        def forward(self, x):
            y = self.routed(x)
            left.last = y.mean()
            return y

    configured()
    blocks = layers(LeavingElsewhere)
    train(blocks, checkpoint)
    references = [weakref.ref(block) for block in blocks]
    checkpointing.registry.reset()
    with pytest.raises(RuntimeError, match="a backward has come to the second forward of a block"):
        left.last.backward()
    del blocks
    assert [reference() for reference in references] == [None] * LAYERS


def test_a_checkpoint_inside_the_block_is_part_of_it():
    class Nested(Experts):
        def forward(self, x):
            return checkpoint(self.routed, x)

    plain = train(layers(), plainly)
    runtime = configured()
    assert same(train(layers(Nested), checkpoint), plain)
    assert runtime.calls == runtime.recordings + LAYERS * 3


# -- blocks that must not run twice


class Normed(Experts):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.batch(self.routed(x))


class Writing(Experts):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        y = self.routed(x)
        self.total += y.detach().sum()
        return y


class ReadingWhatItWrites(Writing):
    def forward(self, x):
        self.total += 1
        return self.routed(x + self.total)


class WritingWithSomeData(Writing):
    """No recording of another call tells of the write."""

    def forward(self, x):
        if x.mean().item() < 0:
            self.total += 1
        return self.routed(x)


class WritingToAList(Experts):
    def __init__(self):
        super().__init__()
        self.totals = [torch.zeros(())]

    def forward(self, x):
        y = self.routed(x)
        self.totals[0] += y.detach().sum()
        return y


class ReadingAViewOfWhatItWrites(Writing):
    def __init__(self):
        super().__init__()
        self.register_buffer("view", self.total.view(1))

    def forward(self, x):
        self.total += 1
        return self.routed(x + self.view)


class Averaging(Experts):
    """Puts a new tensor in the place of one that it reads, at each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean()
        return self.routed(x / self.mean)


class CountingCalls(Experts):
    def forward(self, x):
        self.forwards += 1
        return self.routed(x)


class Differentiating(Experts):
    def forward(self, x):
        y = self.routed(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


class Unwatched(Experts):
    def __init__(self):
        super().__init__()
        self.lot = random.Random(3)

    def forward(self, x):
        return self.routed(x * self.lot.random())


class Scripted(Experts):
    """TorchScript interprets the first call of its function, and optimizes later ones, which save other tensors."""

    def __init__(self):
        super().__init__()

        def mix(x, weight):
            return torch.relu(x @ weight) ** 2 * torch.sigmoid(x[:, :1])

        self.mix, self.weight = torch.jit.script(mix), nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x):
        return self.routed(x + self.mix(x, self.weight))


GENERATOR = np.random.default_rng(0)
STATE = GENERATOR.bit_generator.state


class OfAGlobal(Experts):
    def forward(self, x):
        return self.routed(x * GENERATOR.random())


@pytest.mark.parametrize(
    "kind, reason",
    [
        (Normed, "it updates or reads running statistics"),
        (WritingToAList, "it writes to a tensor that it has not made"),
        (ReadingAViewOfWhatItWrites, "(total buffer), of which it holds another view"),
        (Averaging, "its forward changes which tensor mean buffer is"),
        (CountingCalls, "its forward changes block.forwards"),
        (Differentiating, "it runs a backward in its forward"),
        (Scripted, "it calls TorchScript, whose optimizer may have the second forward save other tensors"),
        (Unwatched, "which cannot be watched"),
        (OfAGlobal, "which cannot be watched"),
    ],
)
def test_a_block_that_must_not_run_twice_is_planned_by_its_operators(kind, reason):
    def state(blocks):
        totals = [total for block in blocks for total in getattr(block, "totals", ())]
        return [each.clone() for each in (*blocks.buffers(), *totals)], [block.forwards for block in blocks]

    first, second = layers(kind), layers(kind)
    GENERATOR.bit_generator.state = STATE
    plain = train(first, plainly)
    GENERATOR.bit_generator.state = STATE
    runtime = configured(memory_budget=1.0)
    assert same(train(second, checkpoint), plain)
    (buffers, counts), (our_buffers, our_counts) = state(first), state(second)
    assert counts == our_counts
    zoo.assert_same(buffers, our_buffers)
    remarks = recordings(runtime)[0].remarks_on_replays
    assert any(reason in remark for remark in remarks), remarks


@pytest.mark.parametrize("kind", [Writing, ReadingWhatItWrites])
def test_a_buffer_that_it_writes_to_is_written_to_once(kind):
    first, second = layers(kind), layers(kind)
    plain = train(first, plainly, sizes=(48, 40, 56, 44, 48))
    runtime = configured()
    assert same(train(second, checkpoint, sizes=(48, 40, 56, 44, 48)), plain)
    assert all(each.is_whole for each in recordings(runtime))
    zoo.assert_same([*first.buffers()], [*second.buffers()])
    assert all(
        buffer._version == other._version for buffer, other in zip(first.buffers(), second.buffers(), strict=True)
    )


def test_a_buffer_may_be_reset_before_backward():
    def run(call, block, x):
        y = call(block, x)
        block.total.zero_()
        return y

    assert_exact_as_a_whole(ReadingWhatItWrites, run=run)


def test_a_buffer_that_only_some_data_have_it_write_to_is_an_error():
    configured()
    with pytest.raises(RuntimeError, match=r"modified by an in-place operation.*with some data only, keep it outside"):
        train(layers(WritingWithSomeData), checkpoint, (TOKENS,) * 8)


def test_a_block_of_which_replays_make_nearly_everything_is_planned_by_its_operators():
    class ReadsLast(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)))

        def forward(self, x):
            y = self.layers(x)
            return y * y.abs().max().item()

    runtime, blocks = configured(memory_budget=1.0), layers(ReadsLast)
    train(blocks, checkpoint)
    assert not any(each.is_whole for each in recordings(runtime))


class Table:
    def __init__(self):
        self.loads = [None] * LAYERS


class Logging(Experts):
    """Writes how much it is used into a table of all blocks, which none of them reads."""

    def forward(self, x):
        y = self.routed(x)
        self.table.loads[self.number] = y.detach().square().mean()
        return y


def test_a_table_to_which_all_blocks_write_may_change_before_backward():
    def run(call):
        blocks, table = layers(Logging), Table()
        for number, block in enumerate(blocks):
            block.table, block.number = table, number
        for step in range(3):
            losses = []
            for half in range(2):  # two forwards before a backward
                x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2 * step + half))
                for block in blocks:
                    x = call(block, x.requires_grad_() if x.is_leaf else x)
                losses.append(x.square().mean())
            sum(losses).backward()
        return blocks, [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]

    torch.manual_seed(1)
    _, plain = run(plainly)
    runtime = configured()
    torch.manual_seed(1)
    blocks, ours = run(checkpoint)
    assert len(blocks) == LAYERS and all(map(torch.equal, plain, ours))
    assert any(recording.is_whole for recording in recordings(runtime))
