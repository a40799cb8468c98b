"""What the stages of run_gpu.sh have in common: the command line, the rows, the device, one rank without a launcher."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from processes import free_port
from rows import Rows

Measure = Callable[[Rows, torch.device, Path, bool], None]


def run(name: str, measure: Measure) -> None:
    """Run the stage: `measure(rows, device, folder, rehearses)` writes its rows to FOLDER/name.jsonl.

    Exits with 0 if no row has an error, with 1 if one has; with rows.DEVICE_LOST if the rest needs a new process.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("folder", type=Path, help="for the rows, and whatever else the stage writes")
    parser.add_argument("--until", type=float, required=True, help="when it must have ended, in seconds since 1970")
    parser.add_argument("--resume", action="store_true", help="go on with the rows that are missing in FOLDER")
    parser.add_argument("--rows", default=".*", metavar="PATTERN", help="only rows whose whole names match it")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, on the CPU")
    args = parser.parse_args()
    if not (args.rehearse or torch.cuda.is_available()):
        parser.error("this machine has no CUDA device; --rehearse runs small sizes on the CPU")
    device = torch.device("cpu") if args.rehearse else torch.device("cuda", 0)
    rows = Rows(args.folder / f"{name}.jsonl", args.until - time.time(), args.resume, args.rows)
    gc.freeze()  # peaks are measured after a garbage collection: it need not look at all that has been imported
    with one_rank():
        measure(rows, device, args.folder, args.rehearse)
    sys.exit(1 if rows.has_failed else 0)


@contextmanager
def one_rank() -> Iterator[None]:
    """Within, DeepSpeed makes engines of a single rank, this process."""
    with free_port() as port:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = port
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # NCCL's threads may keep a process from ending
