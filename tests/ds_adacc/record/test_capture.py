"""A capture lets values die to make room, and holds them again afterwards."""

import gc
import time

import pytest
import torch
import zoo
from recorded import captured
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_adacc.config import load
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.program.slots import keep
from ds_adacc.runtime.runtime import Runtime


def rebuildable(recording):
    ops = [recording.ops[index] for index in block_graph(recording).rebuildable_ops]
    values = {index for op in ops for index in (*op.outputs, *op.written) if index is not None}
    return [index for index in sorted(values) if recording.values[index].owned]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_what_had_died_is_saved_again_and_gradients_are_exact(name):
    block, args, kwargs = zoo.example(name)
    expected = zoo.gradients(block, args, kwargs)

    def run(*args, **kwargs):
        found = captured(block, *args, **kwargs)
        state = torch.get_rng_state()
        with found.without(rebuildable(found.recording)):
            pass
        assert torch.equal(state, torch.get_rng_state())
        for position, tensor in zip(found.recording.positions, found.saved, strict=True):
            if position.value is not None:
                assert torch.equal(position.ref.geometry.view(found.tensors[position.ref.index]), tensor)
        found.hand_over(keep)
        return found.output

    zoo.assert_same_bits(expected, zoo.gradients(block, args, kwargs, run))


def test_memory_is_free_meanwhile_but_for_what_the_block_returned():
    found = captured(lambda x: x.sin().tanh().exp(), torch.randn(64, requires_grad=True))
    alive = {i: tensor for i in rebuildable(found.recording) if (tensor := found.tensors.at_hand(i)) is not None}
    storages = {index: StorageWeakRef(tensor.untyped_storage()) for index, tensor in alive.items()}
    del alive
    assert len(storages) == 2, "the results of tanh and of exp; autograd does not save that of the sine"
    with found.without(list(storages)):
        returned = storages.pop(found.recording.ops[-1].outputs[0])
        assert all(storage.expired() for storage in storages.values())
        assert not returned.expired()


def test_a_write_to_what_the_block_returned_is_still_noticed():
    x = torch.randn(64, requires_grad=True)
    found = captured(lambda x: x.sin().exp(), x)
    with found.without(rebuildable(found.recording)):
        pass
    found.hand_over(keep)
    with torch.no_grad():
        found.output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        found.output.sum().backward()


class Cache:
    """Keeps keys and values, as Hugging Face's caches do."""

    def __init__(self, *earlier):
        self.kept = list(earlier)

    def keep(self, *tensors):
        self.kept += tensors
        return tensors


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, caches):
        key, value = caches["of this layer"].keep(self.keys(x), self.values(x))
        if "plain" in caches:
            caches["plain"].append(key)
        return (key @ value.T).softmax(-1) @ value


def test_the_table_says_what_a_cache_among_the_arguments_keeps():
    block, x = Caching(), torch.randn(4, 8, requires_grad=True)
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 0.9}}))
    runtime.checkpoint(block, x, caches={"of this layer": Cache(torch.zeros(3)), "of others": Cache(torch.zeros(5))})
    ((_, variant),) = runtime.blocks.variants()
    assert variant.recording.remarks_on_replays == (
        "Cache: an argument of this class keeps 256 B of what the block has made. No plan frees that as long as it "
        "lives. If it is a cache of keys and values, call the model with use_cache=False",
    )


def test_a_list_may_be_a_cache_too():
    block, x, caches = Caching(), torch.randn(4, 8, requires_grad=True), {"of this layer": Cache(), "plain": []}
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 0.9}}))
    runtime.checkpoint(block, x, caches)
    ((_, variant),) = runtime.blocks.variants()
    names = [remark.partition(":")[0] for remark in variant.recording.remarks_on_replays]
    assert names == ["Cache", "list"]


def test_an_argument_that_keeps_what_it_has_been_given_is_not_named():
    class Looking(nn.Linear):
        def forward(self, x, cache):
            cache.keep(x)
            return super().forward(x).tanh()

    block, runtime = Looking(8, 8), Runtime(load({"adacc": {"codecs": "none", "memory_budget": 0.9}}))
    runtime.checkpoint(block, torch.randn(4, 8, requires_grad=True), Cache())
    ((_, variant),) = runtime.blocks.variants()
    assert variant.recording.remarks_on_replays == ()


class Unreachable:
    """In a cycle: only a collection finds it, and then it computes with a number that is always another one."""

    told = 0.0

    def __init__(self):
        self.itself = self

    def __del__(self):
        Unreachable.told = time.perf_counter()
        torch.zeros(3).add_(Unreachable.told)


def test_what_a_collection_of_garbage_runs_is_no_part_of_a_block():
    """It comes at any allocation in Python: at the next call it would come elsewhere, or not at all."""

    def forward(x):
        garbage = [Unreachable() for _ in range(8)]
        del garbage
        return x.sin().exp()

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        found = captured(forward, torch.randn(64, requires_grad=True))
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
    assert not found.watch.sources
    assert [op.name for op in found.recording.ops] == ["aten.sin.default", "aten.exp.default"]
