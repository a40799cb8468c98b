"""One operator of a recording: what was called, with what, and whether it may be replayed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_adacc import planner
from ds_adacc.program.arguments import ParameterRef, Template, ValueRef, references_in
from ds_adacc.program.function_operator import FunctionOperator
from ds_adacc.program.graphs import is_graph
from ds_adacc.python_state.places import PythonReads


@dataclass(frozen=True)
class Draw:
    """The random numbers that one operator draws from `generator` (Rule R14).

    It draws between the calls `position - 1` and `position` of the pack hook; call -1 is the beginning of the block.
    `before` and `after` are the values that have the generator's state at these two.
    """

    generator: torch.Generator
    position: int
    before: ValueRef
    after: ValueRef


@dataclass(frozen=True)
class WholeBlock:
    """Stands for a whole block where an operator stands in a `RecordedOp` (Rule R20). No replay runs it: a call does.

    `class_name`: as of `Block.class_name`. `repeats_collectives`: whether its second forward calls collectives.
    `writes_to`: the places of the buffers that it writes to, among the recording's.
    """

    class_name: str
    repeats_collectives: bool
    writes_to: tuple[int, ...]

    def __str__(self) -> str:
        return f"block.{self.class_name.replace('.', '_')}{'.with_collectives' * self.repeats_collectives}"


@dataclass(frozen=True)
class RecordedOp:
    """One ATen call. Tensors in `args` and `kwargs` are references; all else is a constant of the program.

    `func`: an OpOverload of torch, a `FunctionOperator`, or a `WholeBlock`.
    `refusal`: why it is never replayed; None if it may be. `draw`: the random numbers that it draws.
    `bases`: the operators that made the values `written`, to which this one writes in place before anyone has read them
    (Rule R4). All are replayed together. The values after the write are the last of `outputs`.
    `python_reads`: what its kernel reads besides its arguments, if that is Python. `detached`: no gradient passes
    through it, since it ran under `torch.no_grad`, or read only tensors that require none. If it writes to a value
    that has a gradient, that gradient stays. None: it seemed so, but what it has made was seen to have a gradient.
    `cached`: autocast keeps what it makes, a cast of a weight, until its context ends. `default_dtype`: torch's default
    when it ran, which the dtype of what it makes may follow (Rule R11).
    """

    index: int
    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]
    refusal: str | None = None
    draw: Draw | None = None
    bases: tuple[RecordedOp, ...] = ()
    written: tuple[int, ...] = ()
    python_reads: PythonReads | None = field(default=None, repr=False)
    detached: bool | None = False
    cached: bool = False
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype, repr=False)

    @property
    def name(self) -> str:
        return str(self.func)

    @property
    def short_name(self) -> str:
        return self.name.split(".")[1] if "." in self.name else self.name

    @property
    def functional_name(self) -> str:
        """The short name of the operator that does not write in place, where this one is the variant that does."""
        return self.short_name.rstrip("_")

    @property
    def replayable(self) -> bool:
        return self.refusal is None

    @property
    def is_aten(self) -> bool:
        """Whether it is torch's own. Its backward step gets all that it has saved before it allocates anything."""
        return self.name.startswith("aten.")

    @property
    def is_function(self) -> bool:
        """Whether it is a call of an `autograd.Function` (Rule R15)."""
        return isinstance(self.func, FunctionOperator)

    @property
    def is_graph(self) -> bool:
        """Whether it is a graph of torch.compile (Rule R17)."""
        return self.is_function and is_graph(self.func.cls)

    @property
    def references(self) -> Iterator[ValueRef | ParameterRef]:
        return references_in((self.args, self.kwargs))

    @property
    def reads(self) -> tuple[int, ...]:
        """Indices of the values it reads, each once, in order of first use."""
        return tuple(dict.fromkeys(ref.index for ref in self.references if isinstance(ref, ValueRef)))

    @property
    def makes(self) -> tuple[int, ...]:
        """Indices of the values that it makes."""
        return tuple(index for index in self.outputs if index is not None)

    @property
    def parts(self) -> tuple[RecordedOp, ...]:
        """The operators that a replay runs, in order: those that made what this one writes to, and this one."""
        return (*(part for base in self.bases for part in base.parts), self)

    @property
    def draws(self) -> tuple[Draw, ...]:
        """The draws of all its parts."""
        return tuple(part.draw for part in self.parts if part.draw is not None)

    @property
    def of_planner(self) -> planner.Op:
        """The operator as the planner sees it, which counts the values alone."""
        return planner.Op(self.short_name, self.needs if self.replayable else self.reads, self.makes, self.replayable)

    @functools.cached_property
    def template(self) -> Template:
        """Its arguments, ready to be filled with tensors."""
        return Template(self.args, self.kwargs)

    @functools.cached_property
    def sources(self) -> tuple[ValueRef | ParameterRef, ...]:
        """What a replay reads: the references of all its parts but those to what they make, and generators' states."""
        written = {index for part in self.parts for index in part.written}
        read = (ref for part in self.parts for ref in part.references)
        kept = (ref for ref in read if not (isinstance(ref, ValueRef) and ref.index in written))
        return (*kept, *(state for draw in self.draws for state in (draw.before, draw.after)))

    @functools.cached_property
    def needs(self) -> tuple[int, ...]:
        """Indices of the values that a replay reads, each once."""
        return tuple(dict.fromkeys(ref.index for ref in self.sources if isinstance(ref, ValueRef)))
