"""A number that an object keeps as an attribute decides nothing if no code that the block runs names it."""

import argparse
import functools
import types

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

LOSSLESS = {"codecs": "none", "memory_budget": 0.8, "rectifier": {"enabled": False}}
ARGUMENTS = argparse.Namespace(iteration=0, scale=2.0, **{f"argument{n}": [n] for n in range(500)})


def of_globals():
    return ARGUMENTS


class Block(nn.Module):
    def __init__(self, arguments, read):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)
        self.arguments, self.read = arguments, read

    def forward(self, x):
        scale = self.read(self.arguments() if callable(self.arguments) else self.arguments)
        return self.fc2((self.fc1(x) * scale).sin().cos().sin().cos())


def named(arguments):
    return arguments.scale


def beside_a_method(arguments):
    assert zoo.HolderBlock.eval is nn.Module.eval  # no call of the function `eval`
    return arguments.scale


def by_text(arguments):
    return getattr(arguments, "scale")  # noqa: B009


def by_a_made_name(arguments):
    return getattr(arguments, "sca" + "le")


def by_a_pattern(arguments):
    match arguments:
        case types.SimpleNamespace(scale=scale):
            return scale


BY_PARTIAL = functools.partial(getattr)


def by_a_partial(arguments):
    return BY_PARTIAL(arguments, "".join(("sca", "le")))


class Config:
    __match_args__ = ("scale",)

    def __init__(self):
        self.iteration, self.scale = 0, 2.0


def by_place(arguments):
    match arguments:
        case Config(scale):
            return scale


KNOWN = [(argparse.Namespace(iteration=0, scale=2.0 + 0.5 * n), n + 1.0) for n in range(12)]


def by_equality(arguments):
    return next(factor for known, factor in KNOWN if known == arguments)


def evaluated(arguments):
    return eval("arguments.sca" + "le")


def printed(arguments):
    return float(repr(arguments).partition("scale=")[2].strip(")"))


def in_turn(arguments):
    return sum(each for each in vars(arguments).values() if type(each) is float)


def by_a_format(arguments):
    return float("{.scale:.2f}".format(arguments))  # noqa: UP032


def by_its_state(arguments):
    return sum(each for each in arguments.__getstate__().values() if type(each) is float)


def by_what_pickle_reads(arguments):
    return sum(each for each in arguments.__reduce_ex__(2)[2].values() if type(each) is float)


def steps(arguments, read, change, count=8):
    """Train a block, and change the arguments after each step. Returns the runtime and the block's variants."""
    torch.manual_seed(0)
    work, block = Runtime(load({"adacc": LOSSLESS}), has_engine=True), Block(arguments, read)
    for _ in range(count):
        x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
        zoo.assert_exact(block, (x,), {}, lambda *given: work.checkpoint(block, *given))
        work.controller.end_step()
        change(arguments() if callable(arguments) else arguments)
    return work, work.blocks.all()[0].variants()  # which die with the block


def next_iteration(arguments):
    arguments.iteration += 1


def next_scale(arguments):
    arguments.scale += 0.5


def few():
    return types.SimpleNamespace(iteration=0, scale=2.0)


@pytest.mark.parametrize("arguments", [of_globals, few()], ids=["of the globals", "attribute"])
@pytest.mark.parametrize("read", [named, beside_a_method])
def test_an_iteration_among_the_arguments_of_a_script(arguments, read):
    work, variants = steps(arguments, read, next_iteration)
    assert work.recordings == 3  # once more for each of three values
    assert [variant.doubt for variant in variants] == [""]


@pytest.mark.parametrize(("read", "count"), [(named, 5), (in_turn, 24)])
def test_an_iteration_where_no_length_comes_twice(read, count):
    """Recorded at three values, and at two lengths more. What reads it without its name is recorded each time."""
    torch.manual_seed(0)
    arguments = few()
    work, block = Runtime(load({"adacc": LOSSLESS}), has_engine=True), Block(arguments, read)
    for step in range(24):
        x = torch.randn(2, 9 + 7 * step % 24, zoo.WIDTH, requires_grad=True)
        zoo.assert_exact(block, (x,), {}, lambda *given: work.checkpoint(block, *given))
        work.controller.end_step()
        next_iteration(arguments)
    assert work.recordings == count


def test_a_count_of_the_module_that_the_blocks_are_of():
    """As Megatron's closures reach it. The number of a module that is read counts."""
    torch.manual_seed(0)
    work, module = Runtime(load({"adacc": LOSSLESS}), has_engine=True), Block(few(), lambda _: module.scale)
    module.scale, module.count = 2.0, 0
    for step in range(8):
        x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
        plain = zoo.gradients(module, (x,), {})

        def run(x):
            return work.checkpoint(lambda x: module.forward(x), x)

        zoo.assert_same_bits(plain, zoo.gradients(module, (x,), {}, run))
        work.controller.end_step()
        module.count += 1
        module.scale += step == 4
    assert work.recordings == 4  # at three values of the count, and at the second scale
    assert not any(variant.doubt for variant in work.blocks.all()[0].variants())


READS = [named, by_text, by_a_pattern, by_a_made_name, by_a_partial, in_turn, evaluated, printed]


@pytest.mark.parametrize("read", READS)
def test_a_number_that_is_read_counts(read):
    work, _ = steps(few(), read, next_scale, 3)
    assert work.recordings == 3


@pytest.mark.parametrize(
    ("make", "read"), [(Config, by_place), (lambda: argparse.Namespace(iteration=0, scale=2.0), by_equality)]
)
def test_a_number_that_is_read_without_its_name_counts_if_it_makes_a_difference(make, read):
    work, _ = steps(make(), read, next_scale, 3)
    assert work.recordings == 3


WITHIN_C = [by_a_format, by_what_pickle_reads]
if hasattr(object, "__getstate__"):  # from Python 3.11 on
    WITHIN_C.append(by_its_state)


@pytest.mark.parametrize("read", WITHIN_C)
def test_a_number_that_is_read_within_a_function_in_c_counts_from_its_fourth_value_too(read):
    """The first three values decide nothing."""
    _, variants = steps(few(), lambda held: 1.0 if read(held) < 3.4 else 3.0, next_scale, 6)
    assert variants and not any(variant.history.unread for variant in variants)


@pytest.mark.parametrize("read", [by_a_made_name, by_a_partial, in_turn])
def test_all_count_where_names_are_made(read):
    work, _ = steps(few(), read, next_iteration, 3)
    assert work.recordings == 3


def test_a_number_that_has_made_a_difference_once_counts_for_good():
    """Of its values the first and the last are the same, and decide something; those between them decide nothing."""
    start, values = few(), iter((2.5, 3.0, 3.5, 4.0, 2.0, 2.0))

    def change(held):
        held.scale = next(values)

    _, variants = steps(few(), lambda held: 3.0 if held == start else 1.0, change, 6)
    assert variants and not any(variant.history.unread for variant in variants)


FACTORS = {"of": 2.0}


def factor():
    return FACTORS["of"]


def test_what_evaluated_text_calls_is_seen():
    def change(_):
        FACTORS["of"] += 0.5

    work, _ = steps(few(), lambda _: eval("factor()"), change, 3)
    assert work.recordings == 3


def test_items_have_no_names():
    holder = types.SimpleNamespace(scale=[2.0], table={"a": 1.0})

    def change(held):
        held.scale[0] += 1.0
        held.table["a"] += 1.0

    work, _ = steps(holder, lambda held: held.scale[0] * sum(held.table.values()), change, 3)
    assert work.recordings == 3
