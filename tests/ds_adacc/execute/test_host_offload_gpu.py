"""On a CUDA device: what is copied out comes back bit for bit, whatever becomes of the memory it lay in."""

import gc
import time

import pytest
import torch
import zoo
from recorded import captured, offloading, profile_of, record, under
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.execute.host_offload import CudaTransfer, Prefetcher
from ds_adacc.planner.profile import payload_offloaded
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.measure import measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20
MAKER = CodecMaker(load({"adacc": {"codecs": dict.fromkeys(("block_input", "linear", "gelu", "other"), "group")}}))
WIDTH = 512


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def transfer(device):
    return CudaTransfer(device)


def noise(nbytes, device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device, generator=generator)


def overwrite(nbytes, device):
    """Tensors that take what memory of this size the allocator gives away, written to at once."""
    return [torch.full((nbytes,), 255, dtype=torch.uint8, device=device) for _ in range(8)]


@pytest.mark.parametrize("nbytes", [1, MIB + 1, 256 * MIB])
def test_roundtrip(transfer, device, nbytes):
    tensor = noise(nbytes, device)
    expected = tensor.cpu()
    handle = transfer.out((tensor,))
    del tensor
    transfer.drop(handle)
    others = overwrite(nbytes, device)
    assert handle.memory.is_pinned()
    transfer.back(handle)
    assert torch.equal(transfer.take(handle)[0].cpu(), expected)
    del others


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_roundtrip_of_a_tensor_on_another_device(transfer, device):
    tensor = noise(MIB, torch.device("cuda", 1 - device.index))
    expected = tensor.cpu()
    handle = transfer.out((tensor,))
    transfer.drop(handle)
    transfer.back(handle)
    (found,) = transfer.take(handle)
    assert found.device == tensor.device and torch.equal(found.cpu(), expected)


def test_roundtrip_on_a_side_stream(transfer, device):
    expected = noise(256 * MIB, device).cpu()
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        tensor = noise(256 * MIB, device)
        handle = transfer.out((tensor,))
        del tensor
        transfer.drop(handle)
        others = overwrite(256 * MIB, device)
        transfer.back(handle)
        copy = transfer.take(handle)[0].clone()
    side.synchronize()
    assert torch.equal(copy.cpu(), expected)
    del others


def test_fetched_on_one_stream_and_taken_on_another(transfer, device):
    expected = noise(256 * MIB, device).cpu()
    handle = transfer.out((noise(256 * MIB, device),))
    transfer.drop(handle)
    transfer.back(handle)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        tensor = transfer.take(handle)[0]
        copy = tensor.clone()
    del tensor
    others = overwrite(256 * MIB, device)
    side.synchronize()
    assert torch.equal(copy.cpu(), expected)
    del others


def test_fetched_twice(transfer, device):
    expected = noise(64 * MIB, device).cpu()
    handle = transfer.out((noise(64 * MIB, device),))
    transfer.drop(handle)
    for _ in range(2):
        transfer.back(handle)
        assert torch.equal(transfer.take(handle)[0].cpu(), expected)


def test_memory_of_a_copy_never_taken_is_not_written_to(transfer, device):
    handle = transfer.out((noise(256 * MIB, device),))
    transfer.drop(handle)
    transfer.back(handle)
    del handle
    others = overwrite(256 * MIB, device)
    torch.cuda.synchronize(device)
    assert all(bool((tensor == 255).all()) for tensor in others)


def test_device_memory_is_let_go_of(transfer, device):
    before = torch.cuda.memory_allocated(device)
    handle = transfer.out((noise(64 * MIB, device),))
    assert torch.cuda.memory_allocated(device) == before + 64 * MIB
    transfer.drop(handle)
    assert torch.cuda.memory_allocated(device) == before
    transfer.back(handle)
    assert torch.cuda.memory_allocated(device) == before + 64 * MIB
    tensor = transfer.take(handle)[0]
    del tensor
    assert torch.cuda.memory_allocated(device) == before


class MLP(nn.Module):
    """Saves what is above 1 MiB for a batch of 2048, and has no backward that adds up in any order."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


def two_blocks(device):
    torch.manual_seed(0)
    blocks = [MLP().to(device) for _ in range(2)]
    return blocks, torch.randn(2048, WIDTH, device=device, requires_grad=True)


def gradients(blocks, runs, x):
    """Of the input and of all parameters."""
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    output = runs[1](runs[0](x))
    return torch.autograd.grad((output * output).sum(), [x, *parameters])


def let_go():
    """Autograd's thread lets go of what it has returned a moment later: it needs Python's lock for that."""
    gc.collect()
    time.sleep(0.05)


def test_two_blocks_that_offload_everything(transfer, device):
    blocks, x = two_blocks(device)
    expected = gradients(blocks, blocks, x)
    prefetcher, runs = Prefetcher(transfer), []
    for block in blocks:
        recording = record(block, (x,), {})
        policy = offloading(recording, planner.retain_policy(profile_of(recording)))
        assert policy.stores.count(planner.OFFLOAD) >= 3
        runs.append(under(block, recording, policy, prefetcher=prefetcher)[0])
    for _ in range(5):
        for a, b in zip(expected, gradients(blocks, runs, x), strict=True):
            assert torch.equal(a, b)


def compressing(recording, device, codecs, is_away):
    """The policy that compresses all saved values with the codecs, by value, made for it."""
    stores = list(planner.retain_policy(profile_of(recording)).stores)
    for value in recording.values:
        if value.index in recording.saved and (names := MAKER.on_offer(value, recording)):
            codecs.setdefault(value.index, MAKER.make(names[0], device, None))
            stores[value.index] = payload_offloaded(names[0]) if is_away else names[0]
    return planner.Policy(tuple(stores))


def test_two_blocks_that_offload_every_payload(transfer, device):
    blocks, x = two_blocks(device)
    prefetcher, found = Prefetcher(transfer), []
    for is_away in (False, True, True, True):
        runs = []
        for block in blocks:
            recording, codecs = record(block, (x,), {}), {}
            policy = compressing(recording, device, codecs, is_away)
            assert len(codecs) >= 3
            runs.append(under(block, recording, policy, codecs, prefetcher)[0])
        found.append(gradients(blocks, runs, x))
    for each in found[1:]:
        zoo.assert_same(found[0], each)
    assert not all(torch.equal(a, b) for a, b in zip(found[0], gradients(blocks, blocks, x), strict=True))


def test_no_payload_is_held_between_forward_and_backward(transfer, device):
    blocks, x = two_blocks(device)
    recording, codecs = record(blocks[0], (x,), {}), {}
    prefetcher = Prefetcher(transfer)
    run, calls = under(blocks[0], recording, compressing(recording, device, codecs, True), codecs, prefetcher)
    gradients([blocks[0]], [run, run], x)
    let_go()
    before = torch.cuda.memory_allocated(device)
    output = run(run(x))
    moved = sum(calls[-1].bound.moved_bytes(index) for index, *_ in calls[-1].bound.offloaded)
    assert 2 * moved <= torch.cuda.memory_allocated(device) - before - output.nbytes <= 2 * moved + MIB
    for _ in range(2):  # two more calls begin
        prefetcher.pass_over()
    assert torch.cuda.memory_allocated(device) - before <= output.nbytes + MIB
    del output, calls[:]
    gc.collect()
    assert torch.cuda.memory_allocated(device) <= before + MIB


def test_nothing_is_left_after_backward(transfer, device):
    blocks, x = two_blocks(device)
    recording = record(blocks[0], (x,), {})
    policy = offloading(recording, planner.retain_policy(profile_of(recording)))
    prefetcher = Prefetcher(transfer)
    run, _ = under(blocks[0], recording, policy, prefetcher=prefetcher)
    gradients([blocks[0]], [run, run], x)
    let_go()
    before = torch.cuda.memory_allocated(device)
    output = run(run(x))
    for _ in range(2):  # two more calls begin
        prefetcher.pass_over()
    held = torch.cuda.memory_allocated(device) - before
    assert held <= output.nbytes + MIB  # cuBLAS may have a workspace
    output.sum().backward()
    for tensor in (x, *blocks[0].parameters()):
        tensor.grad = None
    del output
    assert torch.cuda.memory_allocated(device) <= before + MIB


def test_value_written_to_after_the_forward_raises(transfer, device):
    blocks, x = two_blocks(device)
    recording = record(blocks[0], (x,), {})
    policy = offloading(recording, planner.retain_policy(profile_of(recording)))
    run, _ = under(blocks[0], recording, policy, prefetcher=Prefetcher(transfer))
    h = x * 1.0
    output = run(h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match=r"value input\.0 of shape .*modified by an in-place operation"):
        output.sum().backward()


def test_offload_is_measured_and_on_offer(device):
    blocks, x = two_blocks(device)
    found = captured(blocks[0], x)
    recording = found.recording
    codecs = CodecMaker(load({"adacc": {"codecs": "none"}}))
    profile = measure(recording, found, codecs)
    assert profile.overlap_seconds > (0.0, 0.0)
    offered = {recording.values[i].name for i, costs in enumerate(profile.codecs) if costs}
    assert offered == {value.name for value in recording.values if value.index in recording.saved}
    for value, costs in zip(recording.values, profile.codecs, strict=True):
        for cost in costs:
            assert (cost.codec, cost.nbytes) == (planner.OFFLOAD, 0)
            for seconds in (cost.out_seconds, cost.back_seconds):
                assert 1e9 < value.nbytes / seconds < 1e12
