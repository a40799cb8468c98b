"""Share a kernel's work among the threads of torch's own OpenMP team.

Threads of our own would contend with torch's, which spin for a while after each of torch's operators: with as many
threads as cores, codecs then take half as long again.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic
from torch import Tensor

from .compiling import inner, kernel
from .memory import array_at

PART = 1 << 16  # elements; fewer are not worth another thread
PARTS_A_THREAD = 4  # a thread that is held up then leaves most of its share to the others
NEXT, DONE, SIZE, ITEMS, KERNEL, ARGUMENTS = range(6)  # the fields of a job
ROOM = 14  # arguments a kernel may have beside `first` and `last`
Job = ctypes.c_int64 * (ARGUMENTS + ROOM)


@intrinsic
def _add_one(typing, address):  # noqa: ANN001
    """Add one to the int64 at an address, as one step among all threads; return what it was."""

    def generate(context, builder, signature, arguments):  # noqa: ANN001
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(types.int64), generate


@intrinsic
def _call(typing, function, first, last, arguments):  # noqa: ANN001
    """Call a compiled kernel at its address, with ROOM arguments more from an address; return 0 unless it raised.

    In C's calling conventions, which Numba's functions have, a function does not see arguments beyond its own.
    """
    number, byte = ir.IntType(64), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.IntType(32), [byte.as_pointer(), byte.as_pointer(), *[number] * (2 + ROOM)])

    def generate(context, builder, signature, given):  # noqa: ANN001
        address, first, last, rest = given
        entry = builder.inttoptr(address, kind.as_pointer())
        fields = builder.inttoptr(rest, number.as_pointer())
        places = [builder.gep(fields, [ir.Constant(number, i)]) for i in range(ROOM)]
        room = [cgutils.alloca_once(builder, byte) for _ in range(2)]  # for what a kernel returns and raises
        return builder.call(entry, [*room, first, last, *map(builder.load, places)])

    return types.int32(types.int64, types.int64, types.int64, types.int64), generate


@inner
def take(job: int, size: int) -> int:
    """Return the first item of a part that no other thread has."""
    return _add_one(job + 8 * NEXT) * size


@kernel
def work(job: int) -> None:
    """Work on parts of the job at an address until none is left."""
    fields = array_at(job, ARGUMENTS, np.int64)
    size, items = fields[SIZE], fields[ITEMS]
    first = take(job, size)
    while first < items:
        if _call(fields[KERNEL], first, min(first + size, items), job + 8 * ARGUMENTS) == 0:
            _add_one(job + 8 * DONE)
        first = take(job, size)


class OpenMP:
    """Runs kernels on as many threads as torch's operators have.

    Any number of threads may call at once: each has a team of its own, as with torch. In a forked child, whose team did
    not survive the fork, the caller works alone; also where torch comes without OpenMP, as `limit` then says.
    """

    def __init__(self) -> None:
        self._parallel = _parallel()
        self._addresses: dict[tuple[Dispatcher, int], int] = {}
        os.register_at_fork(after_in_child=self._stay_alone)

    def run(self, function: Dispatcher, items: int, elements: int, step: int, *arguments: Any) -> None:
        """Call the kernel `function(first, last, *arguments)` so that range(items) is covered.

        The cuts are multiples of `step`; `elements` is what the items are in all. Tensors among the arguments are
        passed as their addresses. Raises MemoryError if the kernel fails: it can do so only for want of room.
        """
        threads = torch.get_num_threads()
        wanted = min(threads * PARTS_A_THREAD, elements // PART) if self._parallel and threads > 1 else 1
        size = max(step, -(-items // (max(wanted, 1) * step)) * step)
        job = Job(0, 0, size, items, self._address(function, 2 + len(arguments)), *addresses(arguments))
        if wanted > 1 and self._parallel:
            self._parallel(self._address(work, 1), ctypes.addressof(job), threads, 0)
        else:
            work(ctypes.addressof(job))
        parts = -(-items // size)
        if job[DONE] != parts:
            raise MemoryError(f"{function.__name__} failed in {parts - job[DONE]} of {parts} parts")

    @property
    def limit(self) -> str:
        """What keeps kernels from running on several threads, or ""."""
        if self._parallel:
            return ""
        return "they run on one thread: torch has no GNU OpenMP (GOMP_parallel), or this process was forked"

    def _address(self, function: Dispatcher, count: int) -> int:
        """The address of a kernel of so many integers, compiled if need be."""
        known = self._addresses.get((function, count))
        if known is None:
            if count > 2 + ROOM:
                raise ValueError(f"{function.__name__} takes {count} arguments; a kernel may have {2 + ROOM}")
            compiled = function.get_compile_result(types.void(*[types.int64] * count))
            name = compiled.fndesc.llvm_cfunc_wrapper_name if function is work else compiled.fndesc.llvm_func_name
            known = self._addresses[function, count] = compiled.library.get_pointer_to_function(name)
        return known

    def _stay_alone(self) -> None:
        self._parallel = None


def _parallel() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP that torch runs on, or None.

    A preloaded OpenMP comes before the one that torch is linked to, for torch as well.
    """
    linked = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for library in (None, *([str(linked)] if linked.exists() else [])):
        parallel = getattr(ctypes.CDLL(library), "GOMP_parallel", None)
        if parallel is not None:
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            return parallel
    return None


def addresses(arguments: tuple[Any, ...]) -> list[int]:
    """Return the arguments with tensors as their addresses."""
    return [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]


OPENMP = OpenMP()  # torch's threads are the process's as well
