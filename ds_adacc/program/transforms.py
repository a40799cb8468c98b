"""Leaves torch's transforms for a while: a backward may run under `vmap`, and what it recomputes has no batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_OLD = "VmapMode"  # the dispatch key of the vmap that `is_grads_batched=True` uses


def are_on() -> bool:
    """Whether code runs within a transform of torch.func now."""
    return torch._C._functorch.maybe_current_level() is not None


@contextmanager
def left() -> Iterator[None]:
    """Run code as outside of `torch.func.vmap` and of `torch.autograd.grad(..., is_grads_batched=True)`.

    There random operators raise errors, and so does the forward of an `autograd.Function`.
    """
    with ExitStack() as back:
        if are_on():
            back.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._dispatch_tls_is_dispatch_key_included(_OLD):
            torch._C._dispatch_tls_set_dispatch_key_included(_OLD, False)
            back.callback(torch._C._dispatch_tls_set_dispatch_key_included, _OLD, True)
        yield
