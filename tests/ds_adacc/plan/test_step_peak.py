"""The peak of a step on a GPU: neither what came before training nor recording counts. The allocator is a stand-in."""

from contextlib import contextmanager

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.plan.step_peak import StepPeak, resident
from ds_adacc.runtime.runtime import Runtime


class Allocator:
    """As torch counts: what is allocated now, and the most since the count was reset."""

    def __init__(self, monkeypatch):
        self.now = self.most = self.resets = 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: (0, device, 1), raising=False)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self):
        self.most, self.resets = self.now, self.resets + 1

    @contextmanager
    def taking(self, nbytes):
        self.now += nbytes
        self.most = max(self.most, self.now)
        yield
        self.now -= nbytes


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


def test_only_the_step_itself_counts(allocator):
    peak = StepPeak()
    with allocator.taking(900):  # a model is loaded
        pass
    with allocator.taking(100):
        with peak.aside(), allocator.taking(500):  # a block is recorded
            pass
        assert peak.most() == 100
        with allocator.taking(70):
            pass
        with peak.aside(), allocator.taking(500):
            pass
        assert peak.most() == 170
        with allocator.taking(200):
            pass
        assert peak.most() == 300


def test_a_recording_that_raises_does_not_count_either(allocator):
    peak = StepPeak()
    with pytest.raises(KeyError), peak.aside(), allocator.taking(500):
        raise KeyError
    allocator.now -= 500
    assert peak.most() == 500, "what has not been freed is there"
    allocator.reset()
    assert peak.most() == 0


def test_what_an_optimizer_allocates_after_the_peak_is_there_at_the_next_one(allocator):
    peak, gpu = StepPeak(), torch.device("cuda")
    with allocator.taking(100):  # weights
        with peak.aside():
            pass
        with allocator.taking(300):
            pass
        assert peak.beyond(gpu) == 300
        with allocator.taking(200):  # states, from the end of the first step on
            assert peak.beyond(gpu) == 300
    assert peak.beyond(gpu) == 400, "what has been freed may be needed again"
    assert StepPeak().beyond(gpu) == 400, "no block has run"


def test_what_layers_before_the_blocks_save_is_not_there_before_the_step(allocator):
    peak, model = StepPeak(), nn.Identity()
    with allocator.taking(100):  # weights
        peak.begin_with(model)
        with torch.no_grad(), allocator.taking(30):  # an evaluation before training
            model(torch.ones(1))
        model(torch.ones(1))
        with allocator.taking(50):  # a vision tower, say
            with peak.aside():
                pass
            with allocator.taking(300):
                pass
        with allocator.taking(200):  # states, from the end of the first step on
            assert peak.beyond(torch.device("cuda")) == 350
        model(torch.ones(1))
        assert peak.beyond(torch.device("cuda")) == 350
    assert not model._forward_pre_hooks


def test_blocks_on_the_cpu_beside_a_gpu_that_is_in_use(allocator, monkeypatch):
    monkeypatch.setattr("ds_adacc.plan.step_peak.resident", lambda: (500, 800))
    peak = StepPeak()
    with peak.aside():
        pass
    assert peak.beyond(torch.device("cpu")) == 300


def test_on_the_cpu_resident_memory_counts(monkeypatch):
    found = [(500, 800)]
    monkeypatch.setattr("ds_adacc.plan.step_peak.resident", lambda: found[-1])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    peak, cpu = StepPeak(), torch.device("cpu")
    with peak.aside():
        found.append((550, 900))
    with peak.aside():
        pass
    assert peak.beyond(cpu) == 400
    found.append((450, 900))
    assert peak.beyond(cpu) == 450


def test_resident_bytes_are_read(tmp_path):
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t  900 kB\nVmRSS:\t  200 kB\n")
    assert resident(tmp_path / "status") == (200 << 10, 900 << 10)
    assert resident(tmp_path / "none") == (0, 0)


@pytest.mark.parametrize(("budget", "resets"), [("auto", True), (0.9, False)])
def test_statistics_are_reset_for_a_budget_of_auto_and_before_the_first_plan(allocator, monkeypatch, budget, resets):
    monkeypatch.setattr("ds_adacc.program.generators.default_generators", lambda: (torch.default_generator,))
    monkeypatch.setattr("ds_adacc.record.replayable.draws.default_generators", lambda: (torch.default_generator,))
    block, args, _ = zoo.example("gpt")
    runtime = Runtime(load({"adacc": {"memory_budget": budget, "codecs": "none"}}))
    for _ in range(3):
        runtime.checkpoint(block, *args).sum().backward()
    seen = allocator.resets
    assert (seen > 0) == resets
    runtime.checkpoint(zoo.BertBlock(), *args).sum().backward()
    assert allocator.resets == seen
