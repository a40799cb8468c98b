"""Processes that are forks of one which has imported torch, DeepSpeed, transformers and ds_adacc.

Imported anew, these take each rank about ten seconds.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver

import pytest

# DeepSpeed imports original_muon, and with it torch's compiler, when it looks at an optimizer.
IMPORTED = [
    "deepspeed.runtime.zero.muon.original_muon",
    "transformers.models.llama.modeling_llama",
    "ds_adacc.engine.api",
]
ALONE = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # read when torch and DeepSpeed are imported


def start(target, *arguments):
    """A new process, as `multiprocessing.Process` is, that calls `target`; the first call starts their server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ALONE.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def become(stdout, stderr, environment):
    """Write what is printed from now on, by Python or not, to these files; have this environment."""
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in ((1, stdout), (2, stderr)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), descriptor)
