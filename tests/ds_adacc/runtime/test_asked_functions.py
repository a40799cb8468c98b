"""What a program gives to `checkpoint` while blocks of an engine run: those blocks, and functions that call them."""

import functools
import itertools

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.runtime.asked_functions import run_asked
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import unwrap_blocks, wrap_blocks

LAYERS = 4
FAR = {}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(zoo.GPTBlock() for _ in range(LAYERS))

    def layers(self, start, end):
        """A function of its own at each forward, as Megatron makes it: it holds the whole model."""

        def run(x, scale=None):
            for number in range(start, end):
                x = self.blocks[number](x)
            return x if scale is None else x * scale

        return run


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def plain(model):
    """The gradients without ds_adacc."""
    return gradients(model, lambda function, x: function(x), list(model.blocks))


@pytest.fixture
def runtime(model, plain):
    runtime = Runtime(load({"adacc": {"memory_budget": 0.6, "codecs": "none"}}), has_engine=True)
    wrap_blocks({f"blocks.{number}": block for number, block in enumerate(model.blocks)}, runtime)
    return runtime


def ample():
    """A runtime with a budget that lets all be retained."""
    return Runtime(load({"adacc": {"memory_budget": 1.0, "codecs": "none"}}), has_engine=True)


def gradients(model, call, functions):
    """Of one forward and backward, in which `call` is given the functions one after the other."""
    torch.manual_seed(1)
    x = torch.randn(2, 8, zoo.WIDTH, requires_grad=True)
    y = functools.reduce(lambda given, function: call(function, given), functions, x)
    return torch.autograd.grad(y.square().mean(), [x, *model.parameters()])


def trained(model, runtime, functions, steps=4):
    """The gradients of the last of several steps."""
    for _ in range(steps):
        found = gradients(model, functools.partial(given_to_checkpoint, runtime), functions)
        runtime.controller.end_backward()
        runtime.controller.end_step()
    return found


def given_to_checkpoint(runtime, function, /, *args, **kwargs):
    return run_asked(runtime, function, function, args, kwargs)


def recorded(runtime):
    return sorted(block.name for block, _ in runtime.blocks.variants())


def forms(model, number):
    block = model.blocks[number]
    return {
        "a module": block,
        "a partial": functools.partial(block),
        "its call": block.__call__,
        "its forward": block.forward,
        "a lambda": lambda x: block(x),
        "a function that holds the model": model.layers(number, number + 1),
    }


FORMS = ("a module", "a partial", "its call", "its forward", "a lambda", "a function that holds the model")


@pytest.mark.parametrize("form", FORMS)
def test_what_only_calls_a_block_of_the_engine_is_that_block(model, plain, runtime, form):
    found = trained(model, runtime, [forms(model, number)[form] for number in range(LAYERS)])
    zoo.assert_same(found, plain)
    assert recorded(runtime) == [f"blocks.{number} (GPTBlock)" for number in range(LAYERS)]
    assert runtime.recordings == LAYERS + 1, "a tracking step has recorded one again"
    blocks = [block for block, _ in runtime.blocks.variants()]
    assert [len(block.asked_variants()) for block in blocks] == [1] * LAYERS


def test_a_function_of_two_blocks_is_one_block_as_the_program_asks_for(model, plain, runtime):
    functions = [model.layers(0, 2), model.layers(2, 4)]
    found = trained(model, runtime, functions)
    zoo.assert_same(found, plain)
    assert [runtime.blocks.of(function).calls_blocks for function in functions] == [False] * 2
    assert recorded(runtime)[:2] == ["Model.layers.<locals>.run"] * 2


def test_a_function_of_two_blocks_that_are_given_the_same_is_a_block(model, runtime):
    def function(x):
        return model.blocks[0](x), model.blocks[1](x)

    given_to_checkpoint(runtime, function, torch.randn(2, 8, zoo.WIDTH, requires_grad=True))
    assert runtime.blocks.of(function).calls_blocks is False


def test_a_module_that_is_no_block_is_one_from_its_first_call(model, runtime):
    module = nn.Sequential(model.blocks[0])
    given_to_checkpoint(runtime, module, torch.randn(2, 8, zoo.WIDTH, requires_grad=True))
    assert recorded(runtime) == [runtime.blocks.of(module).name]


def test_a_function_that_computes_something_besides_is_a_block(model, runtime):
    functions = [lambda x, block=block: 2.0 * block(x) for block in model.blocks]
    found = trained(model, runtime, functions)
    unwrap_blocks(model.blocks)
    plain = gradients(model, lambda function, x: function(x), functions)
    zoo.assert_same(found, plain)
    assert [runtime.blocks.of(function).calls_blocks for function in functions] == [False] * LAYERS


def test_a_function_that_makes_what_its_block_is_given_is_a_block(runtime):
    """The block would hold its mask until backward. As a part of the function, the mask can be made again."""
    layer, x = zoo.LlamaBlock(), torch.randn(2, 8, zoo.WIDTH, requires_grad=True)
    wrap_blocks({"layer": layer}, runtime)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()

    def makes(x):
        return layer(x, attention_mask=torch.ones(8, 8, dtype=torch.bool).tril())

    def reaches(x):
        return layer(x, attention_mask=mask)

    def is_given(x, mask):
        return layer(x, attention_mask=mask)

    for function, args in ((makes, (x,)), (reaches, (x,)), (is_given, (x, mask))):
        given_to_checkpoint(runtime, function, *args)
        assert runtime.blocks.of(function).calls_blocks is (function is not makes)


def test_functions_that_only_call_each_other_and_a_block_are_that_block(model, runtime):
    inner = model.layers(0, 1)

    def outer(x):
        return given_to_checkpoint(runtime, inner, x)

    x = torch.randn(2, 8, zoo.WIDTH, requires_grad=True)
    for _ in range(2):
        given_to_checkpoint(runtime, outer, x)
    assert [runtime.blocks.of(function).calls_blocks for function in (outer, inner)] == [True, True]
    assert recorded(runtime) == ["blocks.0 (GPTBlock)"]


def test_arguments_may_have_any_name(runtime):
    class Named(zoo.GPTBlock):
        def forward(self, x, *, layer, function, runtime):
            return super().forward(x) * layer

    block, x = Named(), torch.randn(2, 8, zoo.WIDTH, requires_grad=True)
    wrap_blocks({"block": block}, runtime)
    given_to_checkpoint(runtime, block, x, layer=2.0, function=1, runtime=0)
    assert recorded(runtime) == ["block (Named)"]


def test_only_a_whole_call_with_gradients_decides(model, runtime):
    function, x = model.layers(0, 1), torch.randn(2, 8, zoo.WIDTH, requires_grad=True)
    with torch.no_grad():
        given_to_checkpoint(runtime, function, x)
    assert runtime.blocks.of(function).calls_blocks is None
    with pytest.raises(RuntimeError, match="normalized_shape"):
        given_to_checkpoint(runtime, function, x[..., 1:])
    assert runtime.blocks.of(function).calls_blocks is None
    given_to_checkpoint(runtime, function, x)
    assert runtime.blocks.of(function).calls_blocks is True
    assert not runtime.asked.is_asked_for(model.blocks[0]), "no call is left over"


def test_a_call_that_drops_its_layer_decides_nothing(model, runtime):
    counter, x = itertools.count(), torch.randn(2, 8, zoo.WIDTH, requires_grad=True)

    def function(x):
        return model.blocks[0](x) if next(counter) else x

    for expected in (None, True):
        given_to_checkpoint(runtime, function, x)
        assert runtime.blocks.of(function).calls_blocks is expected


def test_a_layer_that_takes_the_place_of_a_block_is_checkpointed_as_a_part_of_its_function(model, runtime):
    function, x = model.layers(0, 1), torch.randn(2, 8, zoo.WIDTH, requires_grad=True)
    given_to_checkpoint(runtime, function, x)
    model.blocks[0] = zoo.GPTBlock()  # through no runtime
    for expected in (None, False, False):
        given_to_checkpoint(runtime, function, x)
        assert runtime.blocks.of(function).calls_blocks is expected
    assert "Model.layers.<locals>.run" in recorded(runtime)


def partitioned(model, runtime):
    """The model with parameters as ZeRO-3 marks them, whose blocks run through the runtime."""
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_active_sub_modules = number, set()
    wrap_blocks({f"blocks.{number}": block for number, block in enumerate(model.blocks)}, runtime)
    return model


def test_under_zero_3_its_blocks_may_be_left_out_of_its_first_call(model, runtime):
    model, counter = partitioned(model, runtime), itertools.count()
    x = torch.randn(2, 8, zoo.WIDTH, requires_grad=True)

    def function(x):
        return model.blocks[0](x) if next(counter) else 2.0 * x

    for expected in (False, True, True):
        given_to_checkpoint(runtime, function, x)
        assert runtime.blocks.of(function).calls_blocks is expected
    assert recorded(runtime) == ["blocks.0 (GPTBlock)"]


def test_no_way_need_lead_from_a_function_to_its_blocks_under_zero_3(model):
    """As through a global dict. Its first call shows that it calls blocks."""
    runtime = ample()
    FAR["block"] = partitioned(model, runtime).blocks[0]
    x = torch.randn(2, 8, zoo.WIDTH, requires_grad=True)
    for _ in range(3):
        given_to_checkpoint(runtime, lambda x: FAR["block"](x), x).sum().backward()
        runtime.controller.end_step()
    assert [len(block.variants()) for block in runtime.blocks.all()] == [1, 1]
    assert runtime.calls == runtime.recordings + 1 == 3
    assert len(runtime.controller.plan.policies) == 1
    FAR.clear()


def test_parameters_may_be_partitioned_after_the_first_call(runtime, caplog):
    """As where a program tries its model before it makes the engine."""
    layer, x = nn.Linear(zoo.WIDTH, zoo.WIDTH), torch.randn(2, 8, zoo.WIDTH, requires_grad=True)

    def function(x):
        return layer(x)

    given_to_checkpoint(runtime, function, x)
    assert runtime.calls == 1
    for number, parameter in enumerate(layer.parameters()):
        parameter.ds_id, parameter.ds_active_sub_modules = number, set()
    given_to_checkpoint(runtime, function, x)
    assert runtime.calls == 1
    assert "ZeRO-3 releases its parameters before the call has ended" in caplog.text


def test_a_function_that_holds_a_partitioned_parameter_runs_under_torchs_checkpoint(runtime, caplog):
    weight, x = nn.Parameter(torch.randn(zoo.WIDTH)), torch.randn(2, 8, zoo.WIDTH, requires_grad=True)
    weight.ds_id, weight.ds_active_sub_modules = 0, set()
    given_to_checkpoint(runtime, lambda x: x * weight, x)
    assert runtime.calls == 0
    assert "ZeRO-3 releases its parameters before the call has ended" in caplog.text


@pytest.mark.parametrize("name", ["forward", "__call__"])
def test_a_method_of_a_block_that_is_compiled_in_place(model, name):
    """Its forward is not compiled, so the runtime that runs the compiled call has no part in it."""
    block, x = model.blocks[0], torch.randn(2, 8, zoo.WIDTH, requires_grad=True)
    block.compile(backend="eager")
    runtime = ample()
    wrap_blocks({"block": block}, runtime)
    for _ in range(2):  # the first call shows that the forward calls no block
        given_to_checkpoint(runtime, getattr(block, name), x)
    assert runtime.recordings == 1
