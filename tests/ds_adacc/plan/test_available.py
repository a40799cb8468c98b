"""What the device has left for activations: read from the machine as it is described, exact to the byte."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from ds_adacc.plan import available
from ds_adacc.plan.step_peak import StepPeak

MIB = 1 << 20


@pytest.fixture
def machine(monkeypatch):
    """1000 MiB in all, 800 MiB available, no limited cgroup."""
    memory = SimpleNamespace(available=800 * MIB, total=1000 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(available, "_left_in_cgroups", lambda: iter(()))
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def cpu(recomputed=0, beyond=0):
    peak = SimpleNamespace(beyond=lambda device: beyond)
    return available.available_bytes(torch.device("cpu"), recomputed, peak)


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_ranks_on_the_machine_share_its_memory(machine, name):
    assert cpu() == 750 * MIB
    machine.setenv(name, "3")
    assert cpu() == 250 * MIB


def test_a_cgroup_with_less_left_decides(machine):
    machine.setattr(available, "_left_in_cgroups", lambda: iter((900 * MIB, 150 * MIB)))
    assert cpu() == 100 * MIB


def test_what_the_peak_held_besides_the_blocks_is_not_free(machine):
    assert cpu(recomputed=40 * MIB, beyond=300 * MIB) == (750 - 300 + 40) * MIB


def test_on_cuda_the_peak_counts_what_a_step_needs_besides(monkeypatch):
    numbers = {"memory_allocated": 100, "memory_reserved": 160, "max_memory_allocated": 450}
    for name, mib in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, mib=mib: mib * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (840 * MIB, 1000 * MIB))
    free = 840 + (160 - 100) - (450 - 100) + 30 - 50
    assert available.available_bytes(torch.device("cuda"), 30 * MIB, StepPeak()) == free * MIB


@pytest.mark.parametrize(
    ("line", "where", "limit", "used"),
    [
        ("0::/job", "", "memory.max", "memory.current"),
        ("4:cpu,memory:/job", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_cgroups_of_both_versions_are_read(tmp_path, line, where, limit, used):
    folder = tmp_path / where / "job"
    folder.mkdir(parents=True)
    (folder / limit).write_text("1000\n")
    (folder / used).write_text("700\n")
    (folder / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    (folder.parent / limit).write_text("max\n")
    (tmp_path / "own").write_text(line + "\n")
    assert list(available._left_in_cgroups(tmp_path / "own", tmp_path)) == [450]
