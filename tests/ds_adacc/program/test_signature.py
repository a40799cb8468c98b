"""What tells two calls of a block apart, and what does not."""

import collections

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ds_adacc.program.signature import (
    Signature,
    ambient,
    describe,
    differ_in_sizes,
    differing_numbers,
    flatten,
    surroundings,
)


def test_blocks_run_plain_where_torch_traces_them():
    seen = []

    def traced(x):
        seen.append(surroundings())
        return x * 2

    torch.jit.trace(traced, torch.ones(2), check_trace=False)
    make_fx(traced)(torch.ones(2))
    traced(torch.ones(2))
    assert seen == [
        "it is called while torch.jit.trace traces it",
        "it is called while torch.fx traces it, as in make_fx",
        None,
    ]


def test_keyword_arguments_in_another_order_are_another_call():
    first, second = torch.zeros(2), torch.ones(3)
    found = []
    key = flatten(((), {"mask": first, "rope": second, "causal": True}), found)
    assert flatten(((), {"mask": first, "rope": second, "causal": True}), []) == key
    assert flatten(((), {"causal": True, "rope": second, "mask": first}), []) != key
    assert [id(tensor) for tensor in found] == [id(first), id(second)]


def test_arguments_in_another_order_do_not_differ_in_sizes_or_numbers():
    def signature(*names, length=9):
        tensors = []
        key = flatten(((torch.zeros(2, length),), dict.fromkeys(names, 2.0)), tensors)
        return Signature(key, describe(tensors), ambient=ambient(), training=True)

    assert not differ_in_sizes(signature("a", "b"), signature("b", "a", length=12))
    assert differ_in_sizes(signature("b", "a"), signature("b", "a", length=12))
    assert differing_numbers(signature("a", "b"), signature("b", "a")) == {}


def test_a_name_and_its_value_belong_together():
    one, two = ({"a": 1, "b": 2}, {"a": 2, "b": 1})
    assert flatten(one, []) != flatten(two, [])


class Cache:
    """Keys of earlier layers, as Hugging Face's decoders pass from layer to layer."""

    def __init__(self, *lengths):
        self.keys = [torch.zeros(2, 4, length, 16) for length in lengths]


def signature(length, cache, hidden=32):
    tensors = []
    key = flatten(((torch.zeros(2, length, hidden),), {"cache": cache}), tensors)
    return Signature(key, describe(tensors), ambient=ambient(), training=True)


def test_calls_that_differ_in_sizes():
    assert differ_in_sizes(signature(9, None), signature(12, None))
    assert not differ_in_sizes(signature(9, None), signature(9, None)), "they do not differ"
    assert not differ_in_sizes(signature(9, None), signature(12, "other")), "another argument differs too"


def test_tensors_inside_objects_may_follow_the_arguments():
    assert differ_in_sizes(signature(9, Cache(9)), signature(12, Cache(12)))
    assert differ_in_sizes(signature(9, Cache(9)), signature(16, Cache(16))), "16 is a size of something else too"
    assert not differ_in_sizes(signature(9, Cache(9)), signature(12, Cache(20))), "it follows no argument"
    assert not differ_in_sizes(signature(9, Cache(9)), signature(12, Cache(12, 12))), "there is one more"


@pytest.fixture
def accelerator(monkeypatch):
    """As on a machine with a CUDA device."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    yield
    torch.set_autocast_enabled("cuda", False)


def test_autocast_on_any_device_is_another_call(accelerator):
    plain = ambient()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    half = ambient()
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    bfloat = ambient()
    with torch.autocast("cpu", torch.bfloat16):
        both = ambient()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        keeps_none = ambient()
    assert len({plain, half, bfloat, both, keeps_none}) == 5
    assert plain == torch.get_default_dtype()


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_a_mode_that_sees_every_function_makes_another_call():
    plain = ambient()
    with Mode():
        first = ambient()
    with Mode():
        assert ambient() == first != plain
        with Mode():
            assert ambient() != first


def test_a_default_device_is_told_apart_from_others_but_not_from_itself():
    keys = []
    for device in ("cpu", "cpu", "meta"):
        with torch.device(device):
            keys.append(ambient())
    assert keys[0] == keys[1] != keys[2]
    assert ambient() not in keys


def test_hooks_of_all_modules_make_another_call():
    def hook(factor):
        return lambda module, args, output: output * factor

    def with_hook(register, hook):
        handle = register(hook)
        try:
            return ambient()
        finally:
            handle.remove()

    plain, one = ambient(), hook(2)
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        assert with_hook(register, one) == with_hook(register, hook(2)) != plain
        assert with_hook(register, one) != with_hook(register, hook(3))
    counted = collections.Counter().update
    assert with_hook(register_module_forward_hook, counted) == with_hook(register_module_forward_hook, counted)
    assert ambient() == plain


def test_keys_that_are_equal_numbers_are_told_apart():
    tensor = torch.zeros(2)
    assert len({flatten({key: tensor}, [], []) for key in (1, True, 1.0, "1", 0.0, -0.0)}) == 6
    assert flatten({float("nan"): tensor}, [], []) == flatten({float("nan"): tensor}, [], [])
