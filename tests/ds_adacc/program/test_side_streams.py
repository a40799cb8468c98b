"""A block that runs on two streams: all is restored on the one on which its call began, and the other one waits.

On the CPU with stand-ins for CUDA's streams, which note what happens on them; then on a GPU.
"""

from contextlib import contextmanager

import pytest
import torch
import zoo
from recomputing import recomputing
from torch import nn

from ds_adacc.program.geometry import Geometry
from ds_adacc.program.slots import Holder, ParameterSlot, ValueSlot, keep, on_one_stream, run_packed

HOME, SIDE = 1, 2


class Stream:
    """A stream by its number, on a device; `log` has what it waited for, in order."""

    def __init__(self, number, log):
        self.number, self.device, self.log = number, torch.device("cuda", 0), log

    def wait_stream(self, other):
        self.log.append(f"{self} waits for {other}")

    def __str__(self):
        return {HOME: "home", SIDE: "side"}[self.number]


class Restoring(Holder):
    """A holder that notes the stream on which it restores, and has a payload."""

    def __init__(self, cuda):
        self.cuda, self.payload = cuda, torch.zeros(2)

    def get(self):
        self.cuda.log.append(f"restored on {self.cuda.running[-1]}")
        return torch.ones(3)

    unpack = get

    def held(self):
        return (self.payload,)


class Cuda:
    """Stand-ins for torch.cuda's streams. CPU tensors count as those of device 0."""

    def __init__(self, monkeypatch):
        self.log, self.lent = [], []
        self.home, self.side = Stream(HOME, self.log), Stream(SIDE, self.log)
        self.running = [self.home]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.running[-1])
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "Stream", lambda stream_id, **_: {HOME: self.home, SIDE: self.side}[stream_id])
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", self.data_of_stream, raising=False)
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.lend(tensor, stream))

    def data_of_stream(self, device):
        return self.running[-1].number, device, 1

    def lend(self, tensor, stream):
        self.lent.append((tensor.data_ptr(), str(stream)))

    @contextmanager
    def on(self, stream):
        self.running.append(stream)
        yield
        self.running.pop()


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def saved(cuda, slot, stream):
    """A tensor that an operator saves on this stream, in a call that began on `home`; and its node."""
    tensor = torch.full((3,), 2.0, requires_grad=True)

    def run():
        with cuda.on(stream):
            return tensor.exp()  # saves its result

    output = run_packed(on_one_stream(lambda tensor: slot), run)
    return output, output.grad_fn


def test_what_was_saved_on_the_first_stream_is_restored_as_ever(cuda):
    holder = Restoring(cuda)
    _, node = saved(cuda, holder, cuda.home)
    assert torch.equal(node._saved_result, torch.ones(3))
    assert (cuda.log, cuda.lent) == (["restored on home"], [])


@pytest.mark.parametrize("is_view", [False, True])
def test_what_was_saved_on_another_stream_is_restored_on_the_first_and_lent_to_it(cuda, is_view):
    holder = Restoring(cuda)
    slot = ValueSlot(holder, Geometry.of(torch.ones(3))) if is_view else holder
    output, node = saved(cuda, slot, cuda.side)
    assert cuda.lent == [(output.data_ptr(), "home"), (holder.payload.data_ptr(), "home")], "what replays may read"
    cuda.lent.clear()
    with cuda.on(cuda.side):
        found = node._saved_result
    assert torch.equal(found, torch.ones(3))
    assert cuda.log == ["home waits for side", "restored on home", "side waits for home"]
    assert cuda.lent == [(found.data_ptr(), "side")]


def test_what_is_retained_waits_for_nothing(cuda):
    """As under plain autograd. But replays may read it on the first stream."""
    _, node = saved(cuda, keep(torch.ones(3)), cuda.side)
    with cuda.on(cuda.side):
        assert torch.equal(node._saved_result, torch.ones(3))
    assert cuda.log == []
    assert {stream for _, stream in cuda.lent} == {"home"}
    parameter = nn.Parameter(torch.ones(3))
    cuda.lent.clear()
    _, node = saved(cuda, ParameterSlot(parameter, Geometry.of(parameter)), cuda.side)
    assert torch.equal(node._saved_result, torch.ones(3))
    assert (cuda.log, cuda.lent) == ([], [])


def test_without_a_gpu_autograd_calls_the_hook_itself(monkeypatch):
    """So a call costs nothing more there."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert on_one_stream(keep) is keep


def test_a_recorded_call_restores_on_its_first_stream_too(cuda):
    """When it is recorded it has no plan: what it saves is packed after its forward."""
    linear = nn.Linear(4, 4)

    def block(x):
        h = x.sin().exp()
        with cuda.on(cuda.side):
            side = h.tanh()
        return linear(h) * side

    runtime, x = recomputing(), torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), [x, *linear.parameters()])
    for _ in range(2):
        cuda.log.clear(), cuda.lent.clear()  # they are part of what the block depends on
        output = runtime.checkpoint(block, x)
        (tanh,) = (node for node, _ in output.grad_fn.next_functions if node.name() == "TanhBackward0")
        with cuda.on(cuda.side):
            assert torch.equal(tanh._saved_result, x.sin().exp().tanh())
        assert cuda.log == ["home waits for side", "side waits for home"]
        zoo.assert_same(expected, torch.autograd.grad(output.sum(), [x, *linear.parameters()]))
    assert runtime.recordings == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("begins_on_side", [False, True])
def test_a_value_that_nodes_of_two_streams_need_is_exact(begins_on_side):
    """The replay takes long, and the other stream has nothing else to do; freed memory is overwritten at once."""
    device, width = torch.device("cuda", torch.cuda.current_device()), 2048

    class TwoStreams(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.one, self.two = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
            self.side = torch.cuda.Stream(device)

        def forward(self, x):
            main = torch.cuda.current_stream(device)
            h = self.norm(x).sin().exp()
            self.side.wait_stream(main)
            h.record_stream(self.side)
            with torch.cuda.stream(self.side):
                first = self.one(h).tanh()
            second = self.two(h).tanh()
            main.wait_stream(self.side)
            first.record_stream(main)
            return x + first * second

    torch.manual_seed(0)
    block = TwoStreams().to(device)
    x = torch.randn(4096, width, device=device, requires_grad=True)
    runtime = recomputing()

    def gradients(call):
        with torch.cuda.stream(torch.cuda.Stream(device) if begins_on_side else torch.cuda.current_stream(device)):
            output = call(x)
            found = torch.autograd.grad(output.square().sum(), [x, *block.parameters()])
            junk = [torch.full_like(x, float("nan")) for _ in range(4)]
            torch.cuda.synchronize(device)
            del junk
        return found

    torch.cuda.synchronize(device)
    expected = gradients(block)
    for _ in range(10):  # the first call is recorded
        zoo.assert_same(expected, gradients(lambda x: runtime.checkpoint(block, x)))
