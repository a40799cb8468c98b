"""What is said of a GPU's memory: allocated beside reserved, and the setting that helps where there are gaps."""

from types import SimpleNamespace

import pytest
import torch

from ds_adacc.engine.monitor import _observed
from ds_adacc.observe.calibration import Observation, Pair
from ds_adacc.observe.device_memory import DeviceMemory
from ds_adacc.report.plan_text import _summary

MIB = 1 << 20
CUDA = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 700 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 1000 * MIB)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_gaps_call_for_expandable_segments(device):
    memory = DeviceMemory.of(CUDA)
    assert memory == DeviceMemory(700 * MIB, 1000 * MIB, expandable=False)
    assert memory.advice == "to use the gaps, set PYTORCH_ALLOC_CONF=expandable_segments:True before the run"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_nothing_is_recommended_that_is_set(device, name):
    device.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    assert DeviceMemory.of(CUDA).advice is None


def test_small_gaps_are_no_matter():
    assert DeviceMemory(900, 1000, expandable=False).advice is None


def test_nothing_is_said_of_the_cpu():
    assert DeviceMemory.of(torch.device("cpu")) is None
    assert DeviceMemory.of(None) is None


def test_the_table_and_the_monitor_say_so(device):
    seen = Observation(Pair(1, 1), None, None, DeviceMemory.of(CUDA))
    numbers = dict.fromkeys(("budget", "peak", "without", "held", "added_seconds", "solve_seconds"), 1)
    budget = SimpleNamespace(fraction=None)
    lines = _summary(SimpleNamespace(**numbers, proven_optimal=True, cached=0), budget, seen)
    at = lines.index("  device memory at most: 700.00 MiB allocated, 1000.00 MiB reserved")
    assert "expandable_segments:True" in lines[at + 1]
    assert dict(_observed(seen))["reserved_bytes"] == 1000 * MIB
