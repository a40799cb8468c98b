"""The backward of a graph of torch.compile: may it be run ahead of training's own, and how?

It reuses the memory of what its forward has saved for what it makes itself, which AOTAutograd calls donated buffers. So
every run must be given copies.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._functorch import config as functorch_config

from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.graphs import RUN_AS_CUDA_GRAPH, run_in_cuda_graphs
from ds_adacc.program.refusals import OF_TORCH

OF_INDUCTOR = ("inductor", "inductor_prims", "mkldnn", "quantized")  # namespaces of plain operators of its own
_ONLY_COMPUTE = (*OF_TORCH, *OF_INDUCTOR)
_DEVICE_NUMBER = re.compile(r"index\s*=\s*\d+|(?<=cuda:)\d+")
_OPERATOR = re.compile(r"torch\.ops\.(?P<namespace>\w+)(\.\w+)*")


def given_copies() -> AbstractContextManager[Any]:
    """In here, the backward of a graph may run while autograd keeps the graph. What it has saved must be copies.

    AOTAutograd checks no more, in this thread, that it runs only once.
    """
    return functorch_config.patch(donated_buffer=False)


def has_run(cls: type[torch.autograd.Function]) -> bool:
    """Whether the graph's backward has been compiled, which its first run does.

    If that is one for which autograd keeps the graph, then none ever reuses memory.
    """
    return getattr(cls, "compiled_bw", None) is not None


def why_not_ahead(node: Any, device: torch.device) -> str | None:
    """Why the backward of autograd's `node`, which is of a graph, must not be run ahead of training's own."""
    if run_in_cuda_graphs(device):
        return RUN_AS_CUDA_GRAPH.format("its backward")
    held = vars(node)
    if held.get("opaque_objects") or next(tensors_in(list(held.values())), None) is not None:
        return "its backward reads tensors or objects that torch.compile keeps where no hook sees them"
    code = _code_of(type(node)._forward_cls)
    if code is None:
        return "nothing tells what its compiled backward calls, which may be a collective"
    unknown = next((each for each in _OPERATOR.finditer(code) if each["namespace"] not in _ONLY_COMPUTE), None)
    return unknown and f"its compiled backward calls {unknown[0]}, which may hold a collective"


def fingerprint(cls: type) -> str:
    """What tells a graph from others that save tensors which look the same: of its backward's operators and constants.

    It is the same on all ranks, and in the next run. Empty if nothing tells; then no gradient errors are measured.
    """
    code = _code_of(cls)
    return "" if code is None else hashlib.sha256(_DEVICE_NUMBER.sub("", code).encode()).hexdigest()[:8]


def _code_of(cls: type) -> str | None:
    """The backward's operators in Python, as AOTAutograd keeps them for a later compilation, or finds them on disk.

    What it finds on disk cannot be made a module again if the graph is for any length.
    """
    info = getattr(cls, "_lazy_backward_info", None)
    if hasattr(info, "bw_module"):
        return info.bw_module.code
    serialized = getattr(getattr(info, "bw_module_fn", None), "__self__", None)
    body, *_ = getattr(serialized, "args", ({},))
    return body.get("_code")
