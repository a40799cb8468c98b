"""What allocators hand out and take back between two moments, to the byte."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_adacc.profile.memory_trace import MemoryTrace

CPU = torch.device("cpu")


def test_the_trace_sees_peak_and_rest():
    with MemoryTrace(CPU) as trace:
        kept = torch.empty(1000, dtype=torch.uint8)
        torch.empty(5000, dtype=torch.uint8)
        torch.empty(3000, dtype=torch.uint8)
    assert (trace.peak, trace.left) == (6000, kept.nbytes)


def test_the_trace_leaves_a_profiler_of_the_programs_alone():
    x = torch.randn(100)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with MemoryTrace(CPU) as trace:
            kept = x + x
        x.mul(kept)
    assert (trace.peak, trace.left) == (None, None)
    assert {"aten::add", "aten::mul"} <= {event.name for event in profiler.events()}


def test_growth_is_the_most_above_the_level_at_the_beginning():
    trace = MemoryTrace(CPU)
    trace.start()
    kept = torch.empty(4096, dtype=torch.uint8)
    begin = trace.mark()
    passing = torch.empty(65536, dtype=torch.uint8)
    del passing
    later = torch.empty(1024, dtype=torch.uint8)
    middle = trace.mark()
    del kept
    end = trace.mark()
    trace.stop()
    assert (trace.growth(begin, middle), trace.growth(middle, end)) == (65536, 0)
    assert later.numel() == 1024


def test_buffers_that_gloos_threads_take_do_not_count():
    """They come and go at any moment of the work that runs meanwhile."""
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool:  # each waits for the other
        made = [pool.submit(dist.ProcessGroupGloo, store, rank, 2, timedelta(seconds=60)) for rank in range(2)]
    groups = [each.result() for each in made]
    part, wholes = torch.ones(1000), [[torch.empty(1000) for _ in groups] for _ in groups]
    with MemoryTrace(CPU) as trace:
        running = [group.allgather([whole], [part]) for group, whole in zip(groups, wholes, strict=True)]
        for work in running:
            work.wait()
    assert all(each.equal(part) for whole in wholes for each in whole)
    assert (trace.peak, trace.left) == (2 * part.nbytes, 0)  # each call takes as much for a moment, before its thread


def test_a_transient_leaves_out_what_outlives_the_work():
    """Of a backward: a bucket that stays, a gradient that comes and goes, the gradient of the input."""
    trace = MemoryTrace(CPU)
    trace.start()
    held = torch.empty(256, dtype=torch.uint8)
    begin = trace.mark()
    bucket = torch.empty(1 << 20, dtype=torch.uint8)
    passing = torch.empty(4096, dtype=torch.uint8)
    result = torch.empty(4096, dtype=torch.uint8)
    del passing, held
    end = trace.mark()
    trace.stop()
    assert trace.growth(begin, end) == (1 << 20) + 2 * 4096
    assert trace.transient(begin, end, ()) == 4096
    assert trace.transient(begin, end, (4096,)) == 2 * 4096
    assert trace.transient(begin, end, (512,)) == 4096
    assert bucket.numel() + result.numel() == (1 << 20) + 4096


def test_what_is_kept_for_somebody_else_counts_until_then():
    """Of a backward: something held of the size of a parameter's gradient, which is freed after that has come."""
    trace = MemoryTrace(CPU)
    trace.start()
    held = torch.empty(4096, dtype=torch.uint8)
    begin = trace.mark()
    gradient = torch.empty(4096, dtype=torch.uint8)
    trace.keep(trace.mark(), gradient.nbytes)
    del held
    passing = torch.empty(6000, dtype=torch.uint8)
    end = trace.mark()
    trace.stop()
    del passing
    assert trace.growth(begin, end) == 6000
    assert trace.transient(begin, end, (6000,)) == 4096  # of the gradient; what passes comes in place of what was held


def test_a_trace_that_would_begin_or_end_inside_a_backward_does_not():
    """Torch puts back the thread's profiler after each step of a backward."""
    outer, inner, stopped = MemoryTrace(CPU), MemoryTrace(CPU), []
    x = torch.ones(4, requires_grad=True)
    y = x * 1

    def hook(_):
        inner.start()
        stopped.extend((inner.stop(), outer.stop()))

    y.register_hook(hook)
    outer.start()
    y.sum().backward()
    assert stopped == [True, False]
    assert outer.stop()
    assert (inner.peak, outer.peak > 0) == (None, True)
    assert not torch.autograd._profiler_enabled()


def test_a_trace_of_another_thread_is_left_alone():
    trace, go, done = MemoryTrace(CPU), threading.Event(), []
    thread = threading.Thread(target=lambda: (trace.start(), go.set(), over.wait(), done.append(trace.stop())))
    over = threading.Event()
    thread.start()
    go.wait()
    assert not trace.stop()
    over.set()
    thread.join()
    assert done == [True]
    assert not torch.autograd._profiler_enabled()


def test_a_moment_of_a_thread_that_is_not_seen_is_unknown():
    with MemoryTrace(CPU) as trace:
        begin, elsewhere = trace.mark(), []
        thread = threading.Thread(target=lambda: elsewhere.append(trace.mark()))
        thread.start()
        thread.join()
        end = trace.mark()
    assert trace.growth(begin, end) == 0
    assert trace.growth(begin, *elsewhere) is None and trace.transient(*elsewhere, end, ()) is None


def test_nothing_is_known_beside_a_profiler_of_the_programs_own():
    trace = MemoryTrace(CPU)
    with torch.profiler.profile() as profiler:
        trace.start()
        begin, end = trace.mark(), trace.mark()
        trace.stop()
    assert trace.growth(begin, end) is None
    assert not any("mark" in event.name for event in profiler.events())
