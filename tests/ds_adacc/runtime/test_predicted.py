"""Blocks whose Python decides by an input size that was never recorded: the first call there shows it, and is exact."""

import enum
import re
from dataclasses import replace

import pytest
import torch
import zoo
from any_size import Training
from cases import further
from opaque import array
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ds_adacc import planner
from ds_adacc.runtime import planned_calls as room
from ds_adacc.runtime.wrap import wrap_blocks

RECORDED, LATER = (64, 48, 40, 56), (44, 52, 72, 100, 72)


class Block(nn.Module):
    def __init__(self, number=0):
        super().__init__()
        self.a, self.b = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.number = number

    def forward(self, x):
        return x + self.b(self.inner(self.a(x)).tanh())


class Scaled(Block):
    def inner(self, h):
        return F.gelu(h * (2.0 if h.shape[1] > 64 else 1.0))


class OtherFunction(Block):
    def inner(self, h):
        return (h.sin() if h.shape[1] > 64 else h.cos()).exp()


class Rolled(Block):
    def inner(self, h):
        return F.gelu(h.roll(h.shape[1] % 8, 1))


class OtherParameter(Block):
    def __init__(self, number=0):
        super().__init__(number)
        self.scales = nn.Parameter(torch.rand(2, zoo.WIDTH))

    def inner(self, h):
        return F.gelu(h * self.scales[int(h.shape[1] > 64)])


class Grown(Block):
    """Its buffer is made anew where it is too short."""

    def __init__(self, number=0):
        super().__init__(number)
        self.register_buffer("table", torch.randn(64, zoo.WIDTH), persistent=False)

    def inner(self, h):
        if h.shape[1] > len(self.table):
            self.table = torch.linspace(-1, 1, h.shape[1])[:, None].expand(-1, zoo.WIDTH)
        return F.gelu(h + self.table[: h.shape[1]])


class Alike(Block):
    """Every length runs one program."""

    def inner(self, h):
        return F.gelu(h)


class Windowed(Block):
    """The second layer alone has a window, beyond which it does something else."""

    def __init__(self, number=0):
        super().__init__(number)
        self.window = 64 if number == 1 else None

    def inner(self, h):
        return F.gelu(h * 0.5 if self.window is not None and h.shape[1] > self.window else h * 1.0)


class Deep(Block):
    """The last layer decides by its number, which counts the layers, and by the length."""

    def inner(self, h):
        return F.gelu(h * (0.5 if self.number >= 2 and h.shape[1] > 64 else 1.0))


class TwoBiases(Block):
    """The last layer adds another parameter beyond a length."""

    def __init__(self, number=0):
        super().__init__(number)
        self.one, self.two = nn.Parameter(torch.randn(zoo.WIDTH)), nn.Parameter(torch.randn(zoo.WIDTH))

    def inner(self, h):
        return F.gelu(h + (self.one if self.number >= 2 and h.shape[1] > 64 else self.two))


class Flagged(Block):
    """The last layer decides by its number and by the length, if a flag is set."""

    is_on = False

    def inner(self, h):
        return F.gelu(h * (0.5 if self.is_on and self.number >= 2 and h.shape[1] > 64 else 1.0))


class ManyTokens(Block):
    """The last layer decides by its number and by how many tokens there are."""

    def inner(self, h):
        return F.gelu(h * (0.5 if self.number >= 2 and h.shape[0] * h.shape[1] > 300 else 1.0))


def training(make, monkeypatch, rectifies=False):
    """With 0, 1, 2 as the numbers of the layers; and a list, to which each followed call adds whether it went right.

    Under the smallest budget, all but the last recompute something.
    """
    followed, follow = [], room.follow

    def noted(predicted, call, pack, diverge):
        storages = []

        def seen(tensor):
            storages.append(StorageWeakRef(tensor.untyped_storage()))
            return pack(tensor)

        output, is_as_predicted, reads = follow(predicted, call, seen, diverge)
        followed.append(is_as_predicted)
        assert not is_as_predicted or any(storage.expired() for storage in storages), "what is recomputed is not held"
        return output, is_as_predicted, reads

    def at(budget):
        numbers = iter(range(3))
        return Training(lambda: make(next(numbers)), memory_budget=budget, rectifier={"enabled": rectifies})

    monkeypatch.setattr(room, "follow", noted)
    with pytest.raises(planner.InfeasibleBudget) as refused:
        at(0.01).compare(RECORDED[0])
    return at(float(re.search(r'"memory_budget": (\d\.\d+)', str(refused.value))[1])), followed


@pytest.mark.parametrize("make", [further(Scaled), OtherFunction, Rolled, OtherParameter, Grown, Windowed, Deep])
def test_a_size_at_which_the_program_is_another_one_is_exact(make, monkeypatch):
    runs, followed = training(make, monkeypatch)
    for time in (*RECORDED, *LATER):
        runs.compare(time)
    # The other one is found out while it is recorded at several sizes.
    assert (False in followed) == (make is not Grown)


@pytest.mark.matrix
@pytest.mark.parametrize("make", [Deep, TwoBiases])
@pytest.mark.parametrize("later", [(100, 100, 44, 72, 80, 44, 90), (44, 100, 100, 44, 50, 72)])
def test_lengths_on_both_sides_of_a_threshold_of_the_last_layer(make, later, monkeypatch):
    runs, _ = training(make, monkeypatch)
    for time in (*RECORDED, *later):
        runs.compare(time)


def test_what_was_seen_without_a_flag_tells_nothing_of_calls_with_it(monkeypatch):
    runs, followed = training(Flagged, monkeypatch)
    for time in (*RECORDED, 100, 44):
        runs.compare(time)
    for block in runs.blocks:
        block.is_on = True
    for time in (*RECORDED, 80, 72):
        runs.compare(time)
    assert False in followed


def test_batches_and_lengths_that_vary_together(monkeypatch):
    runs, followed = training(ManyTokens, monkeypatch)
    sizes = ((2, 64), (2, 48), (3, 48), (4, 40), (2, 100), (4, 64), (3, 64), (3, 90), (4, 90), (5, 80))
    for batch, time in sizes:
        runs.compare(time, batch)
    assert False in followed


def test_one_block_is_followed_at_each_new_size_and_all_at_sizes_beyond_those_before(monkeypatch):
    runs, followed = training(Alike, monkeypatch)
    for time in RECORDED:
        runs.compare(time)
    assert all(followed) and runs.runtime.recordings < 3 * len(RECORDED)
    for time, blocks in ((44, 1), (52, 1), (72, 3), (100, 3), (96, 1), (104, 3), (72, 0), (44, 0)):
        followed.clear()
        runs.compare(time)
        assert followed == [True] * blocks, time


def test_one_block_is_followed_of_those_that_are_wrapped(monkeypatch):
    runs, followed = training(Alike, monkeypatch)
    wrap_blocks({f"layers.{number}": block for number, block in enumerate(runs.blocks)}, runs.runtime)
    for time in (*RECORDED, 44, 52):
        followed.clear()
        x = torch.randn(2, time, zoo.WIDTH, requires_grad=True)
        through = x
        for block in runs.blocks:
            through = block(through)
        through.sum().backward()
        runs.adacc.end_step()
    assert followed == [True]


class SavesOther(Block):
    """The operators are the same at each length, but autograd saves another tensor."""

    def inner(self, h):
        sine, cosine = h.sin(), h.cos()
        return sine * cosine.detach() if h.shape[1] > 64 else sine.detach() * cosine


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        out = (x * factor).exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        return gradient * out * ctx.factor, None


class OtherFactor(Block):
    """A Function saves before it has ended, and its factor follows the length."""

    def inner(self, h):
        return Scale.apply(h, 0.5 if h.shape[1] > 64 else 0.25)


class Sorted(Block):
    """The windows of the layers are all different, and do not count them."""

    def __init__(self, number=0):
        super().__init__(number)
        self.window = (1000, 64, 2000)[number]

    def inner(self, h):
        return F.gelu(h * (0.5 if h.shape[1] > self.window else 1.0))


class Mode(enum.Enum):
    FULL, SLIDING = range(2)


class Named(Block):
    def __init__(self, number=0):
        super().__init__(number)
        self.mode = Mode.SLIDING if number == 1 else Mode.FULL

    def inner(self, h):
        return F.gelu(h * (0.5 if self.mode is Mode.SLIDING and h.shape[1] > 64 else 1.0))


class Sliding(Alike):
    def inner(self, h):
        return F.gelu(h * (0.5 if h.shape[1] > 64 else 1.0))


class Full(Alike):
    def inner(self, h):
        return F.gelu(h * 1.0)


def of_two_classes(number):
    return (Full, Sliding, Full)[number](number)


@pytest.mark.parametrize("make", [SavesOther, OtherFactor, Sorted, Named, of_two_classes])
def test_what_decides_by_the_size_is_seen(make, monkeypatch):
    runs, followed = training(make, monkeypatch)
    for time in (*RECORDED, *LATER):
        runs.compare(time)
    assert False in followed


def test_a_block_with_other_numbers_is_followed_too(monkeypatch):
    runs, followed = training(Windowed, monkeypatch)
    for time in (*RECORDED, 44):
        runs.compare(time)
    followed.clear()
    runs.compare(52)
    assert followed == [True, True], "the second layer beside the first"


@pytest.mark.parametrize("make", [further(Scaled), OtherFunction, OtherFactor, Sorted, Named, of_two_classes, Alike])
def test_a_size_that_is_new_in_a_tracking_step(make, monkeypatch):
    """One block is recorded there, and has other constants than at the sizes before. So have those that are like it."""
    runs, _ = training(make, monkeypatch, rectifies=True)
    for time in RECORDED:
        runs.compare(time)
    controller = runs.runtime.controller
    while controller.planning.schedule.observe_in is not None:  # the measured seconds may have led to another plan
        runs.compare(RECORDED[-1])
    controller.planning.schedule = replace(
        controller.planning.schedule, track_from=controller.planning.schedule.ended + 1
    )
    controller.step = controller._next_step()
    assert controller.step.is_tracking
    for time in (72, 100, 72):
        runs.compare(time)


class Launching(nn.Module):
    """As a mixture of experts that numbers its rows by a kernel of its own."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        rows = torch.zeros_like(x)
        array(rows)[...] = 3.0
        return x + self.fc2((self.fc1(x) * rows).sin())


def test_a_kernel_that_the_block_launches_itself_is_predicted():
    runs = Training(Launching, memory_budget=0.85)
    for time in (8, 12, 16, 20, 24, 28, 20, 40):
        runs.compare(time)
    assert runs.runtime.recordings <= 8
