"""Start scripts as processes, each on one thread, and read what they write."""

from __future__ import annotations

import json
import os
import random
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BINARIES = Path(sys.executable).parent

# glibc keeps freed blocks of up to 32 MiB for reuse, and the holes that they leave count as resident: full
# checkpointing then seems to take three times what it does. With these settings freed memory goes back to the system
# at once. The price is page faults, a third of a step's time; hence memory and time come from different runs.
EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

# Where strategies take turns, the opposite: a process keeps all that it frees. Otherwise a step pays page faults for
# what the step before it, of another strategy, gave back.
KEEPING_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@contextmanager
def free_port() -> Iterator[str]:
    """A port that nobody listens on, for the processes of one run."""
    number = _any_port()
    while not _is_free(number):
        number = _any_port()
    port = str(number)
    try:
        yield port
    finally:
        # On the CPU, DeepSpeed leaves 66 MiB of shared memory behind for each port.
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            buffer.unlink()


def _any_port() -> int:
    """A port that Linux gives to no outgoing connection: another process would have it before this run listens."""
    return random.SystemRandom().randrange(20_000, 32_768)


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def alone(script: str, arguments: Sequence[str], extra: Mapping[str, str], result: Path) -> Any:
    """What a script of this source tree writes to the JSON file `result`, as the only rank, without a launcher."""
    with free_port() as port:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        run([sys.executable, script, *arguments], rank | dict(extra), result.with_suffix(".log"))
    return json.loads(result.read_text())


def run(command: Sequence[str], extra: Mapping[str, str], log: Path) -> None:
    """Run the command from the root of this source tree, on one thread; its output goes to `log`.

    `extra` are variables of its environment. Raises RuntimeError with the end of the log if the command fails.
    """
    # DeepSpeed looks for ninja on the PATH; it is installed beside Python.
    environment = os.environ | {"PATH": f"{BINARIES}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"} | dict(extra)
    with log.open("w") as output:
        result = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise RuntimeError(f"{shlex.join(command)} failed; all of its output is in {log}\n\n{tail}")
