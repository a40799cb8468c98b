"""A checkpoint of forwards that save other tensors when they run again, as those of TorchScript do (Rule T2)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ds_adacc.program.random_states import RandomStates
from ds_adacc.program.signature import tensors_held_by


def checkpoint_by_gradient(
    forward: Callable[..., Any], run: functools.partial[Any], parameters: Iterable[torch.Tensor]
) -> Any:
    """Call `forward` with the arguments of `run`. Backward calls it again, and takes the gradients of that call.

    So it does not matter what is saved: TorchScript interprets its first calls, and optimizes later ones. As in any
    reentrant checkpoint of torch's, `torch.autograd.grad` is an error.

    `parameters`: of the block. Raises RuntimeError if an object is returned that has tensors.
    """
    given, form = pytree.tree_flatten((run.args, run.keywords))
    if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in (*given, *parameters)):
        return forward(*run.args, **run.keywords)
    states = RandomStates()
    forms: list[pytree.TreeSpec] = []  # of what each forward has returned

    def on_leaves(_: torch.Tensor, *leaves: Any) -> tuple[Any, ...]:
        # The first forward gets the lists and dicts themselves: it may write to them, as the second must not again.
        args, keywords = pytree.tree_unflatten(leaves, form) if forms else (run.args, run.keywords)
        with states if forms else nullcontext():
            made, form_made = pytree.tree_flatten(forward(*args, **keywords))
        forms.append(form_made)
        for leaf in made:
            _check(leaf)
        return tuple(made)

    # Without an argument that requires a gradient, torch would give none to the parameters.
    requiring = torch.empty(0, requires_grad=True)
    made = checkpoint(on_leaves, requiring, *given, use_reentrant=True, preserve_rng_state=False)
    return pytree.tree_unflatten(made, forms[0])


def _check(returned: Any) -> None:
    """Raises RuntimeError if it is an object with tensors: they would get no gradient."""
    if not isinstance(returned, torch.Tensor) and tensors_held_by(returned):
        raise RuntimeError(
            f"a block with a module of TorchScript returns tensors in an object ({type(returned).__qualname__}), and "
            "its checkpoint cannot bring a gradient to them. Return them in tuples, lists or dicts, or call the block "
            "without a checkpoint"
        )
