"""The copies to pinned memory and back, in which order and on which streams: with stand-ins for CUDA's streams.

The stand-ins note what each stream waits for. That a tensor is freed only after that is what its weak reference shows.
"""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch

from ds_adacc.execute import pinned_pool
from ds_adacc.execute.host_offload import CudaTransfer
from ds_adacc.execute.pinned_pool import Buffer, PinnedPool

CPU = torch.device("cpu")


class Event:
    """An event of the `number`th thing that its stream was given."""

    def __init__(self, stream, number):
        self.stream, self.number = stream, number

    def synchronize(self):
        raise AssertionError("the host must not wait")

    def __repr__(self):
        return f"{self.stream}@{self.number}"


class Stream:
    """A stream that knows what it has been told to wait for, in order."""

    def __init__(self, device=CPU, name=None):
        self.name = name or f"stream{len(STREAMS)}"
        STREAMS.append(self)
        self.waits, self.events = [], 0

    def record_event(self):
        self.events += 1
        return Event(self, self.events)

    def wait_event(self, event):
        assert event is not None
        self.waits.append(event)

    def wait_stream(self, stream):
        self.waits.append(stream)

    def __repr__(self):
        return self.name


STREAMS = []


@pytest.fixture
def cuda(monkeypatch):
    """Stand-ins for torch.cuda's streams. Returns a function that makes a stream the current one."""
    STREAMS.clear()
    running = [Stream(name="compute")]

    @contextmanager
    def on(stream):
        running.append(stream)
        yield
        running.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: running[-1])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: LENT.append((tensor.data_ptr(), stream)))
    monkeypatch.setattr(pinned_pool, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    LENT.clear()
    return on


LENT = []


@pytest.fixture
def transfer(cuda):
    return CudaTransfer(CPU)


def compute():
    return STREAMS[0]


def names(waits):
    return [repr(each) for each in waits]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float32, torch.complex64])
def test_what_is_copied_out_and_dropped_comes_back(transfer, dtype):
    tensor = torch.randn(37).to(dtype)
    expected, reference = tensor.clone(), weakref.ref(tensor)
    handle = transfer.out((tensor,))
    del tensor
    assert reference() is not None, "it stays until it is dropped"
    transfer.drop(handle)
    assert reference() is None
    transfer.back(handle)
    assert torch.equal(transfer.take(handle)[0], expected)
    assert handle.tensors == ()


def test_what_lay_on_another_device_comes_back_to_that(cuda):
    """Blocks of one model may lie on several."""
    transfer, tensor = CudaTransfer(torch.device("cuda", 7)), torch.randn(5)
    handle = transfer.out((tensor,))
    transfer.drop(handle)
    transfer.back(handle)
    (found,) = transfer.take(handle)
    assert found.device == CPU and torch.equal(found, tensor)
    assert names(compute().waits) == ["stream3@1", "stream4@1"], "streams 1 and 2 are of the first device"


def test_several_tensors_are_one_copy(transfer):
    tensors = torch.arange(7, dtype=torch.uint8), torch.randn(3, 5).double(), torch.empty(0), torch.randn(3)
    handle = transfer.out(tensors)
    assert sum(host.nbytes for host in handle.hosts) == 7 + 15 * 8 + 0 + 3 * 4 <= handle.memory.nbytes
    transfer.drop(handle)
    handle.memory.mul_(1)
    transfer.back(handle)
    found = transfer.take(handle)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(tensors, found, strict=True))
    assert names(compute().waits) == ["stream1@1", "stream2@1"], "one event each way"


def test_the_stream_of_a_tensor_waits_for_its_copy_before_it_is_freed(transfer):
    handle = transfer.out((torch.zeros(4),))
    outward = STREAMS[1]
    assert (compute().waits, outward.waits) == ([], [compute()])
    freed = []
    weakref.finalize(handle.tensors[0], lambda: freed.append(names(compute().waits)))
    transfer.drop(handle)
    assert freed == [["stream1@1"]]
    transfer.drop(handle)
    assert len(compute().waits) == 1


def test_a_tensor_that_is_still_there_is_not_fetched(transfer):
    tensor = torch.zeros(4)
    handle = transfer.out((tensor,))
    transfer.back(handle)
    assert transfer.take(handle)[0] is tensor
    assert names(compute().waits) == ["stream1@1"], "whoever frees it now frees it after the copy"
    assert STREAMS[2].waits == []
    transfer.back(handle)
    assert torch.equal(transfer.take(handle)[0], tensor)
    assert names(STREAMS[2].waits) == ["compute", "stream1@1"]


def test_what_was_fetched_and_never_taken_is_freed_after_the_copy(transfer):
    handle = transfer.out((torch.zeros(4),))
    transfer.drop(handle)
    transfer.back(handle)
    freed = []
    weakref.finalize(handle.tensors[0], lambda: freed.append(names(compute().waits)))
    del handle
    assert freed == [["stream1@1", "stream2@1"]]


def test_only_a_tensor_that_is_used_on_another_stream_is_lent_to_it(transfer, cuda):
    handle = transfer.out((torch.zeros(4),))
    transfer.drop(handle)
    transfer.back(handle)
    transfer.take(handle)[0]
    assert LENT == []
    transfer.back(handle)
    with cuda(Stream(name="other")):
        tensor = transfer.take(handle)[0]
    assert [(at, stream.name) for at, stream in LENT] == [(tensor.data_ptr(), "other")]


def test_a_copy_into_a_used_buffer_waits_for_the_last_copy_from_it(transfer):
    handle = transfer.out((torch.zeros(5),))
    memory = handle.memory.data_ptr()
    transfer.drop(handle)
    transfer.back(handle)
    transfer.take(handle)[0]
    del handle
    again = transfer.out((torch.ones(8),))
    assert again.memory.data_ptr() == memory
    assert names(STREAMS[1].waits) == ["compute", "compute", "stream2@1"]


def test_a_copy_that_fails_leaves_nothing(transfer, monkeypatch):
    tensor = torch.zeros(4)
    reference = weakref.ref(tensor)
    monkeypatch.setattr(Stream, "record_event", lambda stream: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        transfer.out((tensor,))
    del tensor
    gc.collect()
    assert reference() is None


@pytest.fixture
def made(monkeypatch):
    sizes = []

    def pinned(nbytes):
        sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(pinned_pool, "pinned", pinned)
    return sizes


def test_a_reserved_pool_makes_nothing_more(made):
    pool = PinnedPool()
    pool.reserve([100, 128, 129, 1])
    assert sorted(made) == [1, 128, 128, 256]
    buffers = [pool.take(nbytes) for nbytes in (1, 200, 120, 65)]
    assert len(made) == 4
    for buffer in buffers:
        pool.give(buffer)
    pool.reserve([100, 128, 129, 1])
    assert len(made) == 4


def test_a_pool_grows_when_more_is_taken_at_once(made):
    pool = PinnedPool()
    first, second = pool.take(64), pool.take(50)
    assert made == [64, 64]
    pool.give(Buffer(first.memory, "event"))
    assert pool.take(60) == (first.memory, "event")
    pool.give(second)


def test_a_buffer_that_could_not_be_made_is_not_counted(made, monkeypatch):
    pool, make = PinnedPool(), pinned_pool.pinned

    def refuse(nbytes):
        raise RuntimeError("no room")

    monkeypatch.setattr(pinned_pool, "pinned", refuse)
    with pytest.raises(RuntimeError, match="no room"):
        pool.reserve([64])
    monkeypatch.setattr(pinned_pool, "pinned", make)
    pool.reserve([64])
    assert made == [64]


def test_a_new_plan_gives_up_what_is_free(made):
    pool = PinnedPool()
    pool.reserve([64, 64, 32])
    used = pool.take(64)
    pool.reserve([64])
    assert sorted(made) == [32, 64, 64]
    pool.give(used)
    pool.take(64), pool.take(32)
    assert sorted(made) == [32, 32, 64, 64], "one of 64 was left, and none of 32"
