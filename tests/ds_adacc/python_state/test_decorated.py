"""A library's decorator hides neither the function that it was given nor what that holds."""

import contextlib
import functools
import logging
import types

import pytest
import torch
import torch.nn.functional as F
import zoo
from changing import recordings
from recomputing import recomputing
from torch import nn

DECORATORS = {
    "disable": torch.compiler.disable,
    "autocast": torch.autocast("cpu", enabled=False),
    "enable_grad": torch.enable_grad(),
    "lru_cache": functools.lru_cache,
    "two": lambda function: torch.compiler.disable(torch.enable_grad()(function)),
    "wraps": lambda function: functools.wraps(function)(torch.compiler.disable(function)),
}


class Block(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, 8)
        self.use = use

    def forward(self, x):
        return self.fc2(torch.sin(self.use(F.gelu(self.fc1(x)))))


@pytest.mark.parametrize("name", DECORATORS)
def test_a_number_in_the_closure_of_a_decorated_function(name):
    numbers = [1.0]

    @DECORATORS[name]
    def use(h):
        return h * numbers[0]

    assert recordings(Block(use), lambda: numbers.__setitem__(0, 3.0)) == 2


def test_a_number_in_the_closure_of_a_decorated_method():
    numbers = [1.0]

    class Scaled(Block):
        @torch.compiler.disable
        def scaled(self, h):
            return h * numbers[0]

        def forward(self, x):
            return super().forward(self.scaled(x))

    assert recordings(Scaled(torch.tanh), lambda: numbers.__setitem__(0, 3.0)) == 2


def test_a_number_in_the_closure_of_a_decorated_hook():
    numbers, block = [1.0], Block(torch.tanh)

    @torch.compiler.disable
    def hook(module, args, output):
        return output * numbers[0]

    block.fc1.register_forward_hook(hook)
    assert recordings(block, lambda: numbers.__setitem__(0, 3.0)) == 2


def test_a_number_in_the_closure_of_a_context_manager():
    numbers = [1.0]

    @contextlib.contextmanager
    def scale():
        yield numbers[0]

    def use(h):
        with scale() as factor:
            return h * factor

    assert recordings(Block(use), lambda: numbers.__setitem__(0, 3.0)) == 2


def test_a_function_that_is_registered_later_for_a_type():
    @functools.singledispatch
    def use(h):
        return torch.tanh(h)

    assert recordings(Block(use), lambda: use.register(torch.Tensor, lambda h: torch.sigmoid(h))) == 2


def test_the_code_of_a_decorated_function():
    use = torch.compiler.disable(lambda h: torch.tanh(h))
    other = lambda h: torch.sigmoid(h)  # noqa: E731
    assert recordings(Block(use), lambda: setattr(use.__wrapped__, "__code__", other.__code__)) == 2


settings = types.SimpleNamespace(scale=1.0)


@functools.lru_cache
def scale():
    return settings.scale


@functools.lru_cache
def table(size):
    return torch.arange(float(size))


@pytest.fixture(autouse=True)
def forgotten():
    settings.scale = 1.0
    scale.cache_clear()


def steps(use):
    """Whether operators of two blocks are replayed. When they are recorded, plain autograd has called `use` already."""
    work, blocks = recomputing(), [Block(use), Block(use)]
    for step in range(4):
        if step == 2:
            settings.scale = 3.0
            scale.cache_clear()
        for block in blocks:
            x = torch.randn(2, 3, zoo.WIDTH, requires_grad=True)
            zoo.assert_exact(block, (x,), {}, functools.partial(work.checkpoint, block))
    return [any(op.replayable for op in variant.recording.ops) for _, variant in work.blocks.variants()]


def test_nothing_is_recomputed_of_a_result_that_was_kept_from_before(caplog):
    with caplog.at_level(logging.WARNING, logger="ds_adacc"):
        assert not any(steps(lambda h: h * scale()))
    assert "scale.results (functools.lru_cache: " in caplog.text
    assert "torch.compiler.assume_constant_result" in caplog.text


@functools.lru_cache
@torch.compiler.assume_constant_result
def declared_below():
    return settings.scale


declared_above = torch.compiler.assume_constant_result(functools.lru_cache(lambda: settings.scale))


@pytest.mark.parametrize("declared", [declared_below, declared_above])
def test_a_result_that_is_declared_to_be_constant_may_be_kept(declared):
    """As transformers does with functions that tell which packages are installed, which its layers of experts call."""
    assert all(steps(lambda h: h * declared()))


def test_a_result_that_depends_on_nothing_but_arguments_may_be_kept():
    assert all(steps(lambda h: h * table(h.shape[-1])))


def test_a_result_that_another_block_has_computed_may_be_used():
    work = recomputing()
    blocks = [Block(lambda h: h * scale()), Block(lambda h: h * scale())]
    for step in range(5):
        if step == 3:
            settings.scale = 3.0
        seen = []
        for call in (lambda block, x: block(x), work.checkpoint):
            if step in (0, 3):
                scale.cache_clear()  # the first block to run computes it
            torch.manual_seed(step)
            x = torch.randn(2, 3, zoo.WIDTH, requires_grad=True)
            seen.append([zoo.gradients(block, (x,), {}, functools.partial(call, block)) for block in blocks])
        for plain, ours in zip(*seen, strict=True):
            zoo.assert_same_bits(plain, ours)
    assert all(any(op.replayable for op in variant.recording.ops) for _, variant in work.blocks.variants())
    assert work.recordings == 4, "each block anew when the scale has changed"


def test_a_result_that_the_block_has_computed_itself_may_be_used_again():
    block, scaled = Block(lambda h: h * scale() + scale()), lambda: settings.__setattr__("scale", 3.0)
    work = recomputing()
    for _ in range(2):
        scale.cache_clear()
        zoo.gradients(block, (torch.randn(2, 3, zoo.WIDTH),), {}, functools.partial(work.checkpoint, block))
        scaled()
    assert all(any(op.replayable for op in variant.recording.ops) for _, variant in work.blocks.variants())
    assert work.recordings == 2


@functools.lru_cache
def settings_kept():
    return types.SimpleNamespace(scale=1.0)


@functools.cache
def numbers_kept(size):
    return [1.0, size]


@pytest.mark.parametrize(
    ("use", "change"),
    [
        (lambda h: h * settings_kept().scale, lambda: setattr(settings_kept(), "scale", 3.0)),
        (lambda h: h * numbers_kept(3)[0], lambda: numbers_kept(3).__setitem__(0, 3.0)),
    ],
)
def test_an_object_that_was_computed_in_a_block_and_kept_may_change(use, change):
    settings_kept.cache_clear()
    numbers_kept.cache_clear()
    work, block = recomputing(), Block(use)
    for step in range(4):
        if step == 2:
            change()
        x = torch.randn(2, 3, zoo.WIDTH, requires_grad=True)
        found = zoo.gradients(block, (x,), {}, functools.partial(work.checkpoint, block))
        zoo.assert_same_bits(zoo.gradients(block, (x,), {}), found)
    assert work.recordings == 3, "also in the second call, as the first one has computed what it holds now"
    assert all(any(op.replayable for op in variant.recording.ops) for _, variant in work.blocks.variants())


first_factor, second_factor = 2.0, 3.0


@functools.lru_cache
def factor_of(number):
    return _first() if number == 1 else _second()


def _first():
    return first_factor


def _second():
    return second_factor


@pytest.mark.parametrize("number", [1, 2])
def test_a_result_that_was_kept_depends_on_all_that_its_function_was_seen_to_read(number, monkeypatch):
    """The first block computes one result, the second another one; the third uses either."""
    factor_of.cache_clear()
    work = recomputing()
    blocks = [zoo.HolderBlock() for _ in range(3)]
    for block, own in zip(blocks, (1, 2, number), strict=True):
        block.use = lambda h, step, own=own: h * factor_of(own)
    for changed in (False, True):
        if changed:
            monkeypatch.setitem(globals(), "first_factor" if number == 1 else "second_factor", 7.0)
            factor_of.cache_clear()
        x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
        found = [zoo.gradients(block, (x,), {}, functools.partial(work.checkpoint, block)) for block in blocks]
        for block, gradients in zip(blocks, found, strict=True):
            zoo.assert_same_bits(zoo.gradients(block, (x,), {}), gradients)
    assert not any(variant.doubt for _, variant in work.blocks.variants())
