"""Our log reaches pytest's capture whatever ran before."""

import collections
import gc
import logging
import zlib

import pytest
import torch
from equal_times import make_times_equal
from solvers import quicken_solver


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=30, help="how many fuzz cases to run (default: 30)")
    parser.addoption("--fuzz-seed", type=int, help="run the fuzz case of this seed alone")
    parser.addoption("--all", action="store_true", help="every case, and every GPU architecture")


def pytest_collection_modifyitems(config, items):
    """Files that start ranks take longest, so they come first: all processes then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("ranks")}
    items.sort(key=lambda item: item.path not in slow)
    if not (config.getoption("--all") or any("::" in argument for argument in config.args)):  # one asked for by name
        left_out = cases_left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def cases_left_out(items):
    """The further cases. Of a matrix, a third runs or, if that is more, as many as run each value of each parameter.

    Always the same ones: which of a matrix, a checksum of their names decides.
    """
    matrices = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix") and hasattr(item, "callspec"):
            matrices[item.nodeid.split("[")[0]].append(item)
    left_out = {item.nodeid for item in items if item.get_closest_marker("further")}
    for cases in matrices.values():
        cases.sort(key=lambda case: zlib.crc32(case.nodeid.encode()))
        met, others = set(), []
        for case in cases:
            values = {(name, repr(value)) for name, value in case.callspec.params.items()}
            if met.issuperset(values):
                others.append(case.nodeid)
            met.update(values)
        left_out.update(others[max(-(-len(cases) // 3) - (len(cases) - len(others)), 0) :])
    return left_out


@pytest.fixture(autouse=True)
def heard():
    from ds_adacc.log import get_logger

    get_logger().propagate = True
    yield
    logging.getLogger("ds_adacc").handlers.clear()


@pytest.fixture(autouse=True)
def unmetered():
    """A runtime that a test leaves in the midst of a step meters on until it is collected."""
    yield
    if torch.autograd._profiler_enabled():
        gc.collect()


@pytest.fixture
def equal_times(monkeypatch):
    make_times_equal(monkeypatch)


@pytest.fixture
def slow_replays(monkeypatch, equal_times):
    """Codecs are quicker than replays, on any machine: a plan that may be lossy is."""
    monkeypatch.setattr("ds_adacc.profile.operator_costs.replay_seconds", lambda *_: 1e-2)


@pytest.fixture(autouse=True, scope="module")
def quick_collector():
    """What is alive before the tests of a file, which is libraries above all, is no part of collections in them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def afresh():
    """`checkpoint` has no runtime: nothing was configured, and no engine was made."""
    from ds_adacc import checkpointing

    checkpointing.registry.reset()
    yield
    checkpointing.registry.reset()


@pytest.fixture
def uncollected():
    """Whatever is freed in the test is freed without the cyclic collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Profiles and journals of the tests, and of processes that they start, are not the user's.

    Compiled CUDA kernels are: their names tell what they were compiled from.
    """
    from ds_adacc.environment import cache_folder

    users, own = cache_folder(), tmp_path_factory.mktemp("cache")
    (own / users.name).mkdir()
    for kernel in users.glob("*.cubin"):
        (own / users.name / kernel.name).symlink_to(kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own))
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_seeds():
    """Torch keeps each seed for a device that may start later, with its stack: 5 ms a seed."""
    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True)
def quick_solver(monkeypatch):
    """Solvers start as forks."""
    quicken_solver(monkeypatch)
