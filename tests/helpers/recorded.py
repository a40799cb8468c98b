"""Run a block under a policy of the test's choice, without any planning."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import torch

from ds_adacc import planner
from ds_adacc.execute.bound_policy import bind
from ds_adacc.execute.call import Call
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.program.signature import flatten
from ds_adacc.program.slots import unpack
from ds_adacc.python_state.closure import closure_of
from ds_adacc.record.block_call import BlockCall
from ds_adacc.record.capture import capture


def tensors_of(args, kwargs):
    tensors = []
    flatten((args, kwargs), tensors)
    return tensors


def call_of(block, *args, **kwargs):
    """A call of the block, before it runs."""
    return BlockCall(tensors_of(args, kwargs), (), closure_of(block), functools.partial(block, *args, **kwargs))


def captured(block, *args, **kwargs):
    """One forward, captured. The recording keeps the parameters alive: the test may have no other use of the block."""
    found = capture("block", call_of(block, *args, **kwargs))
    assert found.recording is not None, found.reason
    found.recording = replace(found.recording, parameters=tuple(found.recording.parameters))
    return found


def record(block, args, kwargs, seed=3):
    """The proven recording of one forward."""
    torch.manual_seed(seed)
    return captured(block, *args, **kwargs).recording


def profile_of(recording):
    """A profile without codecs in which every replay costs one second."""
    graph = block_graph(recording)
    return planner.Profile(graph, (1.0,) * len(graph.ops), ((),) * len(graph.values))


def random_policy(recording, seed):
    """A feasible policy of retain and recompute, each storable value's fate drawn by lot."""
    graph = block_graph(recording)
    lot = random.Random(seed)
    share = lot.random()
    rebuildable = graph.rebuildable_ops
    stores, replays = [None] * len(graph.values), set()
    pending = list(graph.saved)
    while pending:
        index = pending.pop()
        producer = graph.values[index].producer
        if producer not in rebuildable or (graph.values[index].storable and lot.random() < share):
            stores[index] = planner.RETAIN
        elif producer not in replays:
            replays.add(producer)
            pending.extend(graph.ops[producer].inputs)
    policy = planner.Policy(tuple(stores))
    policy.check(profile_of(recording))
    return policy


def offloading(recording, policy):
    """The policy with everything in host memory that it retains and that may go there."""
    stores = list(policy.stores)
    for value, choice in zip(recording.values, policy.stores, strict=True):
        if choice == planner.RETAIN and value.owned and value.geometry.is_dense and not value.dynamic:
            stores[value.index] = planner.OFFLOAD
    return planner.Policy(tuple(stores))


def under(block, recording, policy=None, codecs=None, prefetcher=None):
    """A function that calls the block under `policy` (`codecs` by value), and the list of its `Call`s.

    Without a policy, all is recomputed that may be.
    """
    bound = bind(recording, policy or planner.recompute_policy(profile_of(recording)), codecs or {}, prefetcher)
    calls = []

    def run(*args, **kwargs):
        call = Call(bound, tensors_of(args, kwargs))
        calls.append(call)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, unpack):
            output = block(*args, **kwargs)
        call.confirm(output)
        call.close()
        return output

    return run, calls
