"""The user's model for `ds_adacc plan`: their function makes it, and one forward and backward records its blocks."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_adacc import checkpointing, planner
from ds_adacc.cli.answer import BadInput
from ds_adacc.compact.compact import convert
from ds_adacc.compact.optimized import groups_of
from ds_adacc.config import AdaccConfig
from ds_adacc.plan.available import available_bytes
from ds_adacc.plan.block_type import KnownType
from ds_adacc.plan.budget import UNLIMITED
from ds_adacc.program.arguments import tensors_in
from ds_adacc.python_state.libraries import is_trusted
from ds_adacc.runtime.compiled_blocks import refuse_compiled
from ds_adacc.runtime.find_blocks import find_blocks, none_ran
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import unwrap_blocks, wrap_blocks


@dataclass(frozen=True)
class Recorded:
    """The planner's problem, recorded in one forward and backward. Block types are named after their first blocks.

    `known` are the block types by these names, and `blocks` the names of their blocks in forward order. `available`
    bytes are what the device has for activations.
    """

    batch: int
    problem: planner.Problem
    known: Mapping[str, KnownType]
    blocks: Mapping[str, Sequence[str]]
    device: torch.device
    available: int


class Factory:
    """The user's function: it takes a micro-batch size and returns a model and the arguments of one forward."""

    def __init__(self, text: str) -> None:
        """`text` is MODULE:FUNCTION; the current directory is importable. Raises BadInput."""
        self.text = text
        module, colon, name = text.partition(":")
        if not (module and colon and name):
            raise BadInput(f"function {text!r}: must be MODULE:FUNCTION, such as big:make")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            imported = importlib.import_module(module)
        except Exception as error:
            reason = _described(error)
            hint = f"; did you mean {module[:-3].replace('/', '.')}:{name}?" if module.endswith(".py") else ""
            raise BadInput(f"function {text!r}: module {module!r} cannot be imported: {reason}{hint}") from error
        function = getattr(imported, name, None)
        if not callable(function):
            near = difflib.get_close_matches(name, [n for n, v in vars(imported).items() if callable(v)], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BadInput(f"function {text!r}: module {module!r} has no function {name!r}{hint}")
        self._function = function
        try:
            self._signature = inspect.signature(self._function)
        except ValueError as error:  # a builtin
            raise BadInput(f"function {text!r}: {error}") from error
        try:
            self._signature.bind(1)
        except TypeError as error:
            wanted = "it must take the micro-batch size as its only argument, as in `def make(batch)`"
            raise BadInput(f"function {text!r} is {name}{self._signature}; {wanted}") from error

    @property
    def default_batch(self) -> int | None:
        """The default of the function's first parameter, if it has one."""
        parameters = list(self._signature.parameters.values())
        default = parameters[0].default if parameters else None
        return default if isinstance(default, int) else None

    def make(self, batch: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model, and positional and keyword arguments. Raises BadInput for whatever the function raises."""
        try:
            made = self._function(batch)
        except Exception as error:
            raise BadInput(f"function {self.text!r} raised {_described(error)}") from error
        match made:
            case (nn.Module() as model, torch.Tensor() as tensor):
                return model, (tensor,), {}
            case (nn.Module() as model, tuple() | list() as inputs):
                return model, tuple(inputs), {}
            case (nn.Module() as model, dict() as inputs):
                return model, (), inputs
        shown = f"({', '.join(type(m).__name__ for m in made)})" if isinstance(made, tuple) else type(made).__name__
        wanted = "(model, inputs): an nn.Module, and the arguments of its forward as a tensor, a tuple or a dict"
        raise BadInput(f"function {self.text!r} returned {shown}; it must return {wanted}")


def record(factory: Factory, section: AdaccConfig, batch: int) -> Recorded:
    """Run one forward and backward at this micro-batch size, and measure each block type. Raises BadInput."""
    model, args, kwargs = factory.make(batch)
    runtime = Runtime(section, has_engine=True)
    try:
        blocks = find_blocks(model, section.blocks)
        refuse_compiled(model, blocks, zero_stage=0)
        if section.compact is not None:
            convert(model, blocks, section.compact, groups_of(model, None, None)).draw(0)
    except ValueError as error:  # a ConfigError too
        raise BadInput(str(error)) from error
    wrap_blocks(blocks, runtime)
    checkpointing.registry.register(runtime)
    try:
        loss = _loss(model(*args, **kwargs))
        loss.backward()
        runtime.controller.end_backward()
    except Exception as error:
        where = f"function {factory.text!r}: a forward and backward at micro-batch {batch}"
        raise BadInput(f"{where} raised {_described(error)}") from error
    finally:
        checkpointing.registry.reset()
        unwrap_blocks(blocks.values())  # a wrapped block refers to itself: the model would outlive its time
    if not runtime.controller.planning.pending:
        raise BadInput(_nothing_to_plan(factory, runtime, list(blocks)))
    problem, names = _problem(runtime)
    agreement = runtime.agreement
    known = {name: agreement.known_types[digest] for digest, name in names.items()}
    blocks_of = {name: list(agreement.forward_order.names(digest).values()) for digest, name in names.items()}
    model.zero_grad(set_to_none=True)  # as at the end of a step
    recomputed = planner.everywhere(planner.recompute_policy, problem).peak
    available = available_bytes(loss.device, recomputed, agreement.budget.peak)
    return Recorded(batch, problem, known, blocks_of, loss.device, available)


def check_sizes(factory: Factory, first: Recorded, second: Recorded) -> None:
    """Raise BadInput if the blocks have the same values at both micro-batch sizes: then neither size was used."""
    graphs = [[block_type.profile.graph.values for block_type in one.problem.block_types] for one in (first, second)]
    if graphs[0] == graphs[1]:
        raise BadInput(
            f"function {factory.text!r} returned inputs of the same size for micro-batches {first.batch} and "
            f"{second.batch}; it must make its inputs for the micro-batch size that it is given"
        )


def _described(error: Exception) -> str:
    """The error, and the innermost line of the user's code that raised it, if there is one."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not is_trusted(frame.f_globals.get("__name__", "")):
            code = frame.f_code
            return f"{type(error).__name__} at {Path(code.co_filename).name}:{line} ({code.co_name}): {error}"
    return f"{type(error).__name__}: {error}"


def _loss(output: Any) -> torch.Tensor:
    """The output's `loss` if it has one, else the sum of all that is floating-point in it and needs a gradient."""
    if isinstance(loss := getattr(output, "loss", None), torch.Tensor):
        return loss.sum()
    found = (each for each in tensors_in(output) if each.is_floating_point() and each.requires_grad)
    sums = [tensor.float().sum() for tensor in found]
    if not sums:
        raise TypeError(f"the output, {type(output).__name__}, has no floating-point tensor that needs a gradient")
    return torch.stack(sums).sum()


def _problem(runtime: Runtime) -> tuple[planner.Problem, dict[str, str]]:
    """The problem, and the names of its block types in the order met: those of their first blocks."""
    runtime.agreement.budget.limit = UNLIMITED  # this plan is not the answer: it gathers the problem
    runtime.controller.planning.plan_pending(runtime.controller.step)
    assert runtime.controller.plan is not None
    (group,) = runtime.controller.plan.groups  # all that ran were alive together
    names: dict[str, str] = {}
    for digest, block_type in runtime.agreement.known_types.items():
        same = sum(block_type.recording.name == runtime.agreement.known_types[other].recording.name for other in names)
        names[digest] = f"{block_type.recording.name} #{same + 1}" if same else block_type.recording.name
    given = {block_type.name: block_type for block_type in group.problem.block_types}
    block_types = tuple(replace(given[digest], name=name) for digest, name in names.items())
    order = tuple(names[digest] for digest in group.problem.order)
    return planner.Problem(block_types, order, group.problem.max_gradient_error), names


def _nothing_to_plan(factory: Factory, runtime: Runtime, found: list[str]) -> str:
    if runtime.blocks.all():
        why = "no block could be recorded; the log says why"
    elif found:
        why = f"{none_ran(found)}; name those that do in adacc.blocks"
    else:
        why = "no block found; name the blocks' classes in adacc.blocks"
    return f"function {factory.text!r}: {why}"
