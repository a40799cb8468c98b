"""Stage `probe`: what is installed and works, each kernel once, and what attention does under every backend."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import recorded
import stage
import throughput
import torch
import torch.nn.functional as F
from origin import origin
from rows import Row, Rows
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import ds_adacc
from ds_adacc import kernels, planner
from ds_adacc.cli import doctor
from ds_adacc.environment import device_name

RECORDINGS = 8
CALLS = 50
CODEC_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BACKENDS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MASKS = ("none", "causal", "bool", "additive")
DROPOUTS = (0.0, 0.1)
# What torch says if a backend cannot run the case, or cuDNN itself refuses it.
REFUSED = ("No available kernel", "No viable backend", "cuDNN Frontend error", "CUDNN_STATUS")


def measure(rows: Rows, device: torch.device, folder: Path, rehearses: bool) -> None:
    rows.measure("machine", lambda: machine(device))
    rows.measure("doctor", examined)
    for name, dtype in product(kernels.CODECS, CODEC_DTYPES[:1] if rehearses else CODEC_DTYPES):
        case = f"kernels {name} {_short(dtype)}"
        rows.measure(case, lambda of=(name, dtype): launch(*of, device))
    for dtype in CODEC_DTYPES:
        rows.measure(f"kernels rank_outliers {_short(dtype)}", lambda dtype=dtype: outliers(dtype, device))
    length, recordings = (16, 2) if rehearses else (256, RECORDINGS)
    for backend, dtype, mask, dropout in cases(rehearses):
        case = f"attention {backend} {_short(dtype)} mask {mask} dropout {dropout}"
        rows.measure(case, lambda of=(backend, dtype, mask, dropout): attention(*of, length, recordings, device))


def cases(rehearses: bool) -> Iterator[tuple[str, torch.dtype, str, float]]:
    """Every combination; the commonest ones first, in case the time is short. In a rehearsal, a few in one dtype."""
    every = list(product(BACKENDS, DTYPES, MASKS, DROPOUTS))
    every.sort(key=lambda case: (DTYPES.index(case[1]), case[3], MASKS.index(case[2])))
    for backend, dtype, mask, dropout in every:
        if not rehearses or (dtype is torch.float32 and (mask == "none" or dropout == 0)):
            yield backend, dtype, mask, dropout


def machine(device: torch.device) -> Row:
    """What a reader of the other rows must know of the machine."""
    memory = dict(zip(("free_bytes", "bytes"), torch.cuda.mem_get_info(), strict=True)) if device.type == "cuda" else {}
    watched = ("CUDA", "TORCH", "PYTORCH", "NCCL", "XDG", "OMP", "PYTHONPATH", "HOME", "TMPDIR", "TRITON", "DS_")
    return {
        **origin(device_name(device)),
        **memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": torch.cuda.nccl.version() if device.type == "cuda" else None,
        "capability": torch.cuda.get_device_capability() if device.type == "cuda" else None,
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "sources": [module.__path__[0] for module in (ds_adacc, kernels, planner)],
        "environment": {key: value for key, value in sorted(os.environ.items()) if key.startswith(watched)},
        "nvidia_smi": _output(["nvidia-smi"]) if device.type == "cuda" else None,
    }


def examined() -> Row:
    """What `ds_adacc doctor` finds. Raises AssertionError if anything is amiss: the other rows would mislead."""
    found = doctor.run(Namespace(config=None, script=None)).document
    assert found["fine"], found
    if torch.cuda.is_available():  # training would go on without these kernels, slowly
        assert not (reason := kernels.why_unusable("cuda")), reason
    return found


def _output(command: list[str]) -> list[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]


def launch(name: str, dtype: torch.dtype, device: torch.device) -> Row:
    """Compress and decompress once. Raises AssertionError if the bits are not the reference's."""
    codec, reference = (throughput.build(name, backend, device) for backend in (device.type, "reference"))
    x = throughput.sample(name, dtype, 1, device)
    began = time.perf_counter()
    payload = codec.compress(x)  # the first launch loads the kernel, and may compile it
    codec.decompress(payload, x.shape, dtype)
    seconds = time.perf_counter() - began
    wrong = throughput.differs(x, codec, reference)
    assert wrong is None, wrong
    return {"first_seconds": seconds, "payload_bytes": sum(each.nbytes for each in payload)}


def outliers(dtype: torch.dtype, device: torch.device) -> Row:
    """Rank the channels of a tensor. Raises AssertionError if the order is not the reference's."""
    x = throughput.sample("outlier", dtype, 1, device)
    found, expected = (kernels.rank_outliers(x, 1.0, backend=backend) for backend in (device.type, "reference"))
    assert all(map(torch.equal, found, expected)), "ranked differently from the reference"
    return {"outliers": int(found[1])}


class Block(nn.Module):
    """Attention alone, with what makes its inputs."""

    def __init__(self, mask: Tensor | None, is_causal: bool, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(128, 3 * 128)
        self.is_causal, self.dropout = is_causal, dropout
        self.register_buffer("mask", mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask, self.dropout, self.is_causal)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v)


class SeenOperators(TorchDispatchMode):
    """Writes down the operators of attention that run, with their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[dict[str, object]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "attention" in str(func) or "softmax" in str(func):
            outputs = [each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, Tensor)]
            shown = [f"{_short(each.dtype)} {list(each.shape)} {each.device}" for each in outputs]
            self.operators.append({"operator": str(func), "outputs": shown})
        return result


def attention(
    backend: str, dtype: torch.dtype, mask: str, dropout: float, length: int, recordings: int, device: torch.device
) -> Row:
    """Which operator runs, what it returns, how often its replay is proven, and the host's microseconds of a call."""
    torch.manual_seed(0)
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    additive = torch.zeros(length, length, dtype=dtype, device=device).masked_fill(~visible, float("-inf"))
    block = Block({"bool": visible, "additive": additive}.get(mask), mask == "causal", dropout)
    block = block.to(device, dtype)
    x = torch.randn(2, length, 128, device=device, dtype=dtype, requires_grad=True)
    with nullcontext() if backend == "default" else sdpa_kernel(BACKENDS[backend]):
        try:
            block(x).sum().backward()
        except RuntimeError as error:
            if not any(words in str(error) for words in REFUSED):
                raise
            return {"unavailable": str(error).splitlines()[0]}
        with SeenOperators() as seen:
            block(x)
        verdicts = Counter(verdict for _ in range(recordings) for verdict in proofs(block, x))
        return {"operators": seen.operators, "verdicts": verdicts, "host_us": host_microseconds(block, x)}


def proofs(block: nn.Module, x: Tensor) -> list[str]:
    """Each operator of attention in a new recording, and why it is not replayed, or that it is."""
    recording = recorded.record(block, (x,), {})
    ops = [op for op in recording.ops if "attention" in op.name or "softmax" in op.name]
    assert ops, f"no operator of attention among {[op.name for op in recording.ops]}"
    return [f"{op.short_name}: {op.refusal or 'is replayed'}" for op in ops]


def host_microseconds(block: Block, x: Tensor) -> float:
    """The host's time for a call of attention, without waiting for the device: the median."""
    q, k, v = block.qkv(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
    taken = []
    for _ in range(CALLS):
        began = time.perf_counter()
        block.attend(q, k, v)
        taken.append(time.perf_counter() - began)
    if x.is_cuda:
        torch.cuda.synchronize()
    return 1e6 * statistics.median(taken)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    stage.run("probe", measure)
