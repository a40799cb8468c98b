"""What is timed: on a CUDA device the run alone, with a cold cache, and the median. CUDA's events are stand-ins."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ds_adacc.profile import timer as module
from ds_adacc.profile.timer import Timer

CUDA = torch.device("cuda", 1)


@pytest.fixture
def log(monkeypatch):
    """What the device is given, in order. Runs take 9, 1, 5, 3 and 7 ms in turn. The current device is another one."""
    noted, durations, current = [], [9.0, 1.0, 5.0, 3.0, 7.0], [torch.device("cuda", 0)]

    @contextmanager
    def on(device):
        current.append(device)
        yield
        current.pop()

    def give(what):
        assert current[-1] == CUDA
        noted.append(what)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            give("event")

        def synchronize(self):
            noted.append("wait")

        def elapsed_time(self, stop):
            return durations[(noted.count("wait") - 1) % 5]

    flush = SimpleNamespace(zero_=lambda: noted.append("flush"))

    def empty(nbytes, dtype, device):
        assert (nbytes, dtype, device) == (2 * 1000, torch.uint8, CUDA)
        return flush

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", give)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1000))
    monkeypatch.setattr(module.torch, "empty", empty)
    return noted


def test_a_run_on_cuda_is_timed_behind_a_sleep_with_a_cold_cache(log, monkeypatch):
    ticks = iter([10.0, 10.001])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    timer = Timer(CUDA)
    assert timer(lambda: log.append("run")) == 0.005, "the median"
    assert timer.noise == pytest.approx((7 - 5) / 5)
    sleep = log[2]
    assert sleep == pytest.approx(2e9 * (2 * 0.001 + 1e-4), abs=2), "until the host has enqueued the run"
    assert log == ["run", "run", *(sleep, "flush", "event", "run", "event", "wait") * 5]


def test_the_device_never_sleeps_long(log, monkeypatch):
    ticks = iter([10.0, 12.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    Timer(CUDA)(lambda: None)
    assert log[0] == pytest.approx(2e9 * 0.0101, abs=2)


def test_a_run_on_the_host_is_the_least_of_three(monkeypatch):
    ticks = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    runs, timer = [], Timer(torch.device("cpu"))
    assert timer(lambda: runs.append(None)) == 2.0
    assert (len(runs), timer.noise) == (4, 0.5)


def test_before_a_run_on_the_host_other_tensors_are_read():
    noted, other = [], SimpleNamespace(sum=lambda: noted.append("read"))
    Timer(torch.device("cpu"))(lambda: noted.append("run"), [other, other])
    assert noted == ["run", *("read", "read", "run") * 3]
