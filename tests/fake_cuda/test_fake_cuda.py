"""Tests that need a GPU run on the fake one, in a process of their own: torch looks for devices only once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "compact/test_projection.py",
    "execute/test_gpu.py",
    "execute/test_host_offload_gpu.py",
    "program/test_same_bits.py",
    "record/test_attention_gpu.py",
    "record/test_backward_inside.py",
    "runtime/test_sync_gpu.py",
    "whole_blocks/test_host_copies_gpu.py",
)
# Inductor compiles for a GPU with Triton. One of the plans whose steps must not wait for the device does most of them.
CHOSEN = "not compiled and (not synchronisation or (lossy and offload and 0.5))"


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch that is built for the CPU")
def test_what_needs_no_kernels_of_cuda_passes():
    files = [f"tests/ds_adacc/{file}" for file in FILES]
    chosen = ["-p", "tests.fake_cuda.plugin", "-p", "no:cacheprovider", "-m", "gpu", "-k", CHOSEN, "-rs"]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, "-m", "pytest", *chosen, *files]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "needs a CUDA device" not in ended.stdout  # the reason for which they are skipped elsewhere
