"""Wrapped blocks stay ordinary modules: they can be copied, saved, and wrapped anew."""

import contextlib
import copy
import functools
import inspect
import io
import types

import pytest
import torch
import zoo
from torch import nn
from torch.utils._contextlib import context_decorator

from ds_adacc.config import load
from ds_adacc.python_state.covered import covered_by
from ds_adacc.python_state.function_marks import wrapped_in
from ds_adacc.runtime.find_blocks import find_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import is_wrapped, unwrap_blocks, wrap_blocks


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(zoo.GPTBlock(dropout=0.0), zoo.GPTBlock(dropout=0.0))


def wrapped(model):
    runtime = Runtime(load({"adacc": {}}), has_engine=True)
    wrap_blocks(find_blocks(model, "auto"), runtime)
    return runtime


def test_a_deep_copy_runs_its_own_weights(model):
    runtime = wrapped(model)
    x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin(x).sum().backward()
    assert torch.equal(twin(x), x)
    assert not torch.equal(model(x), x)
    assert torch.equal(x.grad, torch.ones_like(x))
    assert len(runtime.blocks.all()) == 4


def doubled(self, x):
    return 2 * zoo.GPTBlock.forward(self, x)


@pytest.mark.parametrize(
    "patch", [lambda block: types.MethodType(doubled, block), lambda block: functools.partial(doubled, block)]
)
def test_a_deep_copy_runs_its_own_weights_where_a_forward_was_set_on_the_block(model, patch):
    model[0].forward = patch(model[0])
    x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    expected = model[0](x)
    wrapped(model)
    twin = copy.deepcopy(model[0])
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), 2 * x)
    assert torch.equal(model[0](x), expected)


def test_a_saved_model_comes_back_unwrapped(model):
    wrapped(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.randn(2, 9, zoo.WIDTH)
    assert torch.equal(loaded(x), model(x))
    unwrap_blocks(loaded)
    assert loaded[0].forward.__func__ is zoo.GPTBlock.forward


def test_the_last_runtime_alone_runs_a_block_that_is_wrapped_twice(model):
    first, second = wrapped(model), wrapped(model)
    model(torch.randn(2, 9, zoo.WIDTH, requires_grad=True)).sum().backward()
    assert (first.calls, second.calls) == (0, 2)
    assert second.blocks.variants()[0][1].bound.recording.positions


def test_unwrapped_blocks_can_be_wrapped_as_before(model):
    runtime = wrapped(model)
    before = [block.forward for block in model]
    assert all(list(inspect.signature(forward).parameters) == ["x"] for forward in before)
    wrap_again = unwrap_blocks(model)
    assert [block.forward.__func__ for block in model] == 2 * [zoo.GPTBlock.forward]
    wrap_again()
    assert [block.forward for block in model] == before
    model(torch.randn(2, 9, zoo.WIDTH, requires_grad=True)).sum().backward()
    assert runtime.calls == 2


def test_a_forward_of_the_instance_is_run_and_given_back(model):
    seen = []

    def forward(x):
        seen.append(x)
        return zoo.GPTBlock.forward(model[0], x)

    model[0].forward = forward
    wrapped(model)
    model(torch.randn(2, 9, zoo.WIDTH, requires_grad=True)).sum().backward()
    assert len(seen) == 1
    unwrap_blocks(model)
    assert model[0].forward is forward
    assert "forward" not in vars(model[1])


class Patched(zoo.GPTBlock):
    def forward(self, x):
        return super().forward(x)


def patch_class(block):
    Patched.forward = doubled


def change_class(block):
    block.__class__ = type("Doubled", (Patched,), {"forward": doubled})


@pytest.mark.parametrize("change", [patch_class, change_class])
def test_the_forward_that_its_class_has_now_is_run(change, monkeypatch):
    monkeypatch.setattr(Patched, "forward", Patched.forward)
    model = nn.Sequential(Patched(dropout=0.0), Patched(dropout=0.0))
    runtime, x = wrapped(model), torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    before = model[0](x)
    before.sum().backward()
    change(model[0])
    assert torch.equal(model[0](x), 2 * before)
    assert runtime.calls == 2


@pytest.mark.parametrize("covered", [True, (None,), None])
def test_a_forward_of_the_users_own_with_an_attribute_covered_is_not_taken_for_a_runtimes(model, covered):
    """A program may mark its functions as it likes, as by how far its tests cover them."""

    def forward(x):
        return zoo.GPTBlock.forward(model[0], x)

    forward.covered = covered
    model[0].forward = forward
    assert not is_wrapped(model[0])
    runtime = wrapped(model)
    assert is_wrapped(model[0]) and forward.covered is covered
    model(torch.randn(2, 9, zoo.WIDTH, requires_grad=True)).sum().backward()
    assert runtime.calls == 2
    unwrap_blocks(model)
    assert model[0].forward is forward


def test_what_a_librarys_decorator_holds_is_found_though_it_has_the_attributes_of_the_wrapped_forward(model):
    @contextlib.contextmanager
    def around():
        yield

    wrapped(model)
    decorated = context_decorator(around, model[0].forward)
    assert covered_by(decorated) is covered_by(model[0].forward) is not None
    assert wrapped_in(model[0].forward.__func__) == []
    assert wrapped_in(decorated) == [around.__wrapped__]
