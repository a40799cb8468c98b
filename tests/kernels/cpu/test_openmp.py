"""The team: who computes, under threads, forks, errors and at exit; and the cache on disk."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from ds_adacc.kernels import CODECS, make_codec, separates_outliers
from ds_adacc.kernels.cpu import codecs, openmp
from ds_adacc.kernels.cpu.compiling import kernel
from ds_adacc.kernels.cpu.memory import array_at
from ds_adacc.kernels.cpu.openmp import OPENMP, OpenMP

SIZE = (1037, 1024)  # several parts


def build(name, backend="cpu"):
    channels = torch.tensor([1023, 5]) if separates_outliers(name) else None
    return make_codec(name, backend=backend, group_size=128, channels=channels)


def sample(kit, name, seed):
    return kit.sample(name, SIZE, torch.float32, seed)


def is_right(x, name):
    payload = build(name).compress(x)
    expected = build(name, "reference").compress(x)
    y = build(name).decompress(payload, x.shape, x.dtype)
    z = build(name, "reference").decompress(expected, x.shape, x.dtype)
    return all(map(torch.equal, payload, expected)) and torch.equal(y, z)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@kernel
def mark(first: int, last: int, seen: int, parts: int) -> None:
    """Count each item, and write `last` where a part begins."""
    counts, ends = array_at(seen, last, np.int64), array_at(parts, first + 1, np.int64)
    for i in range(first, last):
        counts[i] += 1
    ends[first] = last


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("items", [1, 2, 7, 100])
@pytest.mark.parametrize("step", [1, 2])
def test_items_are_covered_once_and_cut_at_steps(threads, count, items, step):
    threads(count)
    seen, ends = torch.zeros(items, dtype=torch.int64), torch.zeros(items, dtype=torch.int64)
    OPENMP.run(mark, items, 1 << 24, step, seen, ends)
    assert seen.tolist() == [1] * items
    starts = ends.nonzero().flatten().tolist()
    assert all(start % step == 0 for start in starts)
    assert [*starts[1:], items] == ends[starts].tolist()
    assert len(starts) > 1 or count == 1 or items <= step


@pytest.fixture
def teams(monkeypatch):
    """The sizes of the teams that were called."""
    sizes, parallel = [], OPENMP._parallel

    def called(function, argument, threads, flags):
        sizes.append(threads)
        parallel(function, argument, threads, flags)

    monkeypatch.setattr(OPENMP, "_parallel", called)
    return sizes


pthread_self = ctypes.CDLL(None).pthread_self
pthread_self.argtypes, pthread_self.restype = [], ctypes.c_uint64


@numba.njit
def tell(first: int, last: int, threads: int, waste: int) -> None:
    """Write which thread has each item, after some milliseconds of work."""
    names, sums = array_at(threads, last, np.uint64), array_at(waste, last, np.float64)
    for i in range(first, last):
        names[i] = pthread_self()
        for j in range(1_000_000):
            sums[i] += np.sin(j)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_threads_work_as_torch_has(threads, count):
    threads(count)
    names, waste = torch.zeros(24, dtype=torch.int64), torch.zeros(24, dtype=torch.float64)
    OPENMP.run(tell, 24, 1 << 24, 1, names, waste)
    assert len(set(names.tolist())) == count
    assert threading.get_ident() in names.tolist()


def test_codecs_work_on_the_team(kit, threads, teams):
    for count in (3, 2, 1):
        threads(count)
        assert is_right(sample(kit, "group", 0), "group")
    assert teams == [3, 3, 2, 2]


def test_small_tensors_wake_nobody(threads, teams):
    threads(4)
    build("group").compress(torch.ones(2 * openmp.PART - 1))
    assert teams == []


@pytest.mark.parametrize("count", [1, 2])
def test_without_openmp_the_caller_works_alone(kit, threads, monkeypatch, count):
    threads(count)
    alone = OpenMP()
    monkeypatch.setattr(alone, "_parallel", None)
    assert "one thread" in alone.limit and OPENMP.limit == ""
    monkeypatch.setattr(codecs, "OPENMP", alone)
    assert is_right(sample(kit, "group", 0), "group")


@kernel
def fail(first: int, last: int, bad: int) -> None:
    if first <= bad < last:
        raise MemoryError


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_in_any_part_is_raised(threads, count):
    threads(count)
    for _ in range(20):
        with pytest.raises(MemoryError, match=r"fail failed in 1 of \d+ parts"):
            OPENMP.run(fail, 64, 1 << 24, 1, 40)
    OPENMP.run(fail, 64, 1 << 24, 1, 64)


def test_a_kernel_with_too_many_arguments_is_named():
    with pytest.raises(ValueError, match="mark takes 17 arguments; a kernel may have 16"):
        OPENMP.run(mark, 1, 1, 1, *range(15))


def test_nothing_is_kept_alive(kit, threads):
    threads(2)
    x = sample(kit, "group", 0)
    storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    build("group").compress(x)
    del x
    assert storage.expired()


@pytest.mark.parametrize("name", CODECS)
def test_several_threads_at_once(kit, name, threads):
    threads(2)
    outcomes = {}

    def work(seed):
        outcomes[seed] = all(is_right(sample(kit, name, seed), name) for _ in range(3))

    several = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert outcomes == dict.fromkeys(range(6), True)


class Held(torch.autograd.Function):
    """Identity that holds its input compressed until backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.payload, ctx.shape = build("group").compress(x), x.shape
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * build("group").decompress(ctx.payload, ctx.shape, torch.float32)


def test_several_backward_passes_at_once(kit, threads):
    threads(2)
    right = []

    def work(seed):
        x = sample(kit, "group", seed).requires_grad_()
        Held.apply(x).sum().backward()
        right.append(torch.equal(x.grad, kit.restore(build("group", "reference"), x.detach())))

    several = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert right == [True] * 4


def equal_bytes(x, y):
    """As torch.equal, which waits for ever in a forked child for OpenMP's threads."""
    return x.numpy().tobytes() == y.numpy().tobytes()


def test_a_forked_child_works_alone(kit, threads):
    threads(2)
    tensors = {name: sample(kit, name, 0) for name in CODECS}
    assert all(is_right(x, name) for name, x in tensors.items())
    expected = {name: build(name).compress(x) for name, x in tensors.items()}
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        same = all(all(map(equal_bytes, build(name).compress(x), expected[name])) for name, x in tensors.items())
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(is_right(x, name) for name, x in tensors.items())


class Compressing(torch.utils.data.Dataset):
    """A data set whose items are compressed where they are loaded."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = self.x + index
        torch.set_num_threads(2)
        payload = build("group").compress(x)
        torch.set_num_threads(1)  # as the loader sets it, for torch's own threads do not survive a fork
        return payload


def test_loader_workers(kit, threads):
    threads(2)
    x = sample(kit, "group", 0)
    loader = torch.utils.data.DataLoader(Compressing(x), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for index, payload in enumerate(loader):
        assert all(map(torch.equal, payload, build("group", "reference").compress(x + index)))


FRESH = """
import atexit, torch
from ds_adacc.kernels import make_codec
torch.set_num_threads(2)
x = (torch.arange(1 << 19) % 2).float()
codec = make_codec("bits", backend="cpu", group_size=128)
def run():
    payload = codec.compress(x)
    assert torch.equal(codec.decompress(payload, x.shape, x.dtype), x)
run()
atexit.register(lambda: (run(), print("right at exit", flush=True)))
"""


def fresh(folder):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", FRESH], env=environment, text=True, **pipes)


def indices(folder):
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).rglob("*.nbi")}


@pytest.mark.further
def test_two_processes_fill_one_cache_and_others_use_it(tmp_path):
    """Each of these processes computes to the last: after the main module, in what runs at exit."""
    for process in (fresh(tmp_path), fresh(tmp_path)):
        assert process.communicate(timeout=240) == ("right at exit\n", "")
        assert process.returncode == 0
    written = indices(tmp_path)
    assert {name.split(".")[0] for name in written} == {"bits", "openmp"}
    assert fresh(tmp_path).communicate(timeout=240) == ("right at exit\n", "")
    assert indices(tmp_path) == written
