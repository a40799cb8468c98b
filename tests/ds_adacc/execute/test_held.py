"""What is held between forward and backward is what the policy says, to the byte of storage, without the collector."""

import pytest
import torch
import zoo
from recorded import profile_of, random_policy, record, under
from storages import Storages

from ds_adacc import planner
from ds_adacc.execute.alive_calls import AliveCalls, Forward
from ds_adacc.execute.block import Block
from ds_adacc.execute.bound_policy import bind
from ds_adacc.execute.call import Call
from ds_adacc.execute.variant import Variant
from ds_adacc.kernels import make_codec
from ds_adacc.observe.observer import Observer
from ds_adacc.program.slots import unpack

pytestmark = pytest.mark.usefixtures("uncollected")


def planned_bytes(recording, policy, payloads=None):
    values = [recording.values[i] for i, choice in enumerate(policy.stores) if choice == planner.RETAIN]
    return sum(value.nbytes for value in values if value.origin == "made") + sum((payloads or {}).values())


def forward_only(run, args, kwargs):
    """Bytes that the block's call holds once its output is gone, and those left when its graph is gone too."""
    torch.manual_seed(3)
    with Storages() as storages:
        output = run(*args, **kwargs)
    tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    nodes = [t.grad_fn for t in tensors if t.grad_fn is not None]
    del output, tensors
    held = storages.alive()
    del nodes
    return held, storages.alive()


@pytest.mark.parametrize("name", ["gpt", "llama", "eager", "bert", "opaque", "inplace", "indexed", "many"])
def test_retain_and_recompute(name):
    block, args, kwargs = zoo.example(name)
    recording = record(block, args, kwargs)
    policies = [planner.recompute_policy(profile_of(recording)), planner.retain_policy(profile_of(recording))]
    for policy in [*policies, *(random_policy(recording, seed) for seed in range(5))]:
        run, _ = under(block, recording, policy)
        assert forward_only(run, args, kwargs) == (planned_bytes(recording, policy), 0)


def test_compressed_values_hold_their_payload():
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    policy = planner.retain_policy(profile_of(recording))
    stores, codecs, payloads = list(policy.stores), {}, {}
    for index in recording.saved:
        value = recording.values[index]
        if value.origin == "made" and value.role not in ("statistic", "dropout_mask"):
            stores[index], codecs[index] = "group", make_codec("group", backend="reference", group_size=16)
            payloads[index] = codecs[index].payload_bytes(value.geometry.size, value.geometry.dtype)
    policy = planner.Policy(tuple(stores))
    run, _ = under(block, recording, policy, codecs)
    assert forward_only(run, args, kwargs) == (planned_bytes(recording, policy, payloads), 0)


def test_backward_frees_everything_without_the_collector():
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    run, _ = under(block, recording, random_policy(recording, 1))
    zoo.gradients(block, args, kwargs, run)
    torch.manual_seed(3)
    with Storages() as storages:
        loss = zoo.loss_of(run(*args, **kwargs))
        loss.backward()
    del loss
    block.zero_grad()
    args[0].grad = None
    assert storages.alive() == 0


def test_observation_forgets_what_is_gone():
    block, args, kwargs = zoo.example("gpt")
    recording = record(block, args, kwargs)
    policy = planner.retain_policy(profile_of(recording))
    bound = bind(recording, policy, {})
    observer, known, sizes = Observer(), Variant(digest="digest", policy=policy), []
    for _ in range(3):
        call = Call(bound, args)
        alive = AliveCalls().begin("digest", Forward(lambda: None))
        ticket = observer.begin(known, Block("block"), alive, times_forward=True, times_backward=True)
        pack, done = observer.watch(ticket, call, args, call.pack)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = block(*args, **kwargs)
        done(output)
        call.close()
        sizes.append(len(observer._holders))
        del alive, call, done, output, pack, ticket
    assert sizes[0] == sizes[1] == sizes[2] > 0
    assert len(observer._holders) == 0
