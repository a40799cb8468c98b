"""A few threads that share a kernel's work with the thread that calls it."""

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

PART = 1 << 16  # elements; less is not worth waking a thread for
PARTS_A_THREAD = 4  # so that a thread that is held up leaves its share to the others


class Job:
    """One call of a kernel over a range of items, cut into parts that any thread may take."""

    def __init__(self, kernel: Callable[..., None], parts: list[range], arguments: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self.tensors = arguments  # alive for as long as a thread may write to them
        self.arguments = addresses(arguments)
        self.parts = deque(parts)
        self.outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

    def work(self) -> None:
        """Take parts until none is left."""
        while True:
            try:
                part = self.parts.popleft()
            except IndexError:
                return
            try:
                self.kernel(part.start, part.stop, *self.arguments)
            except BaseException as error:
                self.outcomes.put(error)
            else:
                self.outcomes.put(None)


class Workers:
    """Daemon threads, started when first needed and never more than torch's own; idle ones wait for a job.

    Whoever calls works too, and waits only for parts that others have begun, so any number of threads may call
    at once. A forked child, which inherits no threads, starts anew.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._started = 0

    def run(self, kernel: Callable[..., None], items: int, elements: int, step: int, *arguments: Any) -> None:
        """Call `kernel(first, last, *arguments)` so that range(items) is covered.

        The cuts are multiples of `step`; `elements` is what the items are in all. Tensors among the arguments are
        passed as their addresses.
        """
        threads = torch.get_num_threads()
        wanted = min(threads * PARTS_A_THREAD, elements // PART)
        if threads == 1 or wanted < 2:
            kernel(0, items, *addresses(arguments))
            return
        size = max(step, -(-items // (wanted * step)) * step)
        parts = [range(first, min(first + size, items)) for first in range(0, items, size)]
        job = Job(kernel, parts, arguments)
        self._call(job, min(threads, len(parts)) - 1)
        job.work()
        errors = [error for error in [job.outcomes.get() for _ in parts] if error is not None]
        job.tensors = ()  # a thread that comes too late may hold the job itself a little longer
        if errors:
            raise errors[0]

    def _call(self, job: Job, helpers: int) -> None:
        with self._lock:
            for _ in range(self._started, helpers):
                threading.Thread(target=serve, args=(self._jobs,), name="ds_adacc codec", daemon=True).start()
            self._started = max(self._started, helpers)
        for _ in range(helpers):
            self._jobs.put(job)


def serve(jobs: "SimpleQueue[Job]") -> None:
    """Work on one job after the other."""
    while True:
        jobs.get().work()


def addresses(arguments: tuple[Any, ...]) -> list[int]:
    """Return the arguments with tensors as their addresses."""
    return [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]


WORKERS = Workers()  # the one pool of the process: torch's number of threads is the process's as well
