"""What a call of an `autograd.Function` does, seen from its beginning to its end while a block is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.compiled_backward import OF_INDUCTOR, fingerprint
from ds_adacc.program.function_operator import FunctionOperator, autocast_now, place_of
from ds_adacc.program.geometry import are_one_view, storage_of
from ds_adacc.program.graphs import RUN_AS_CUDA_GRAPH, extended, extents, is_graph, run_in_cuda_graphs, written_by
from ds_adacc.program.known_functions import is_attention
from ds_adacc.program.refusals import COLLECTIVE, CONJUGATE, OPAQUE, refusal_of
from ds_adacc.program.same_bits import all_same_bits, pieces
from ds_adacc.program.schema import LIFTS, has_dynamic_shape, reveals_data, small_integers, written_tensors
from ds_adacc.python_state.places import PythonReads
from ds_adacc.record.executed_call import ExecutedCall
from ds_adacc.record.known_tensors import require_plain
from ds_adacc.record.naming.roles_inside import RolesInside


class FunctionCall:
    """A call of `cls.apply` on `args`. What it calls inside is no part of the program, but tells why not to replay it.

    `states`: of the random generators, before. `packed`: what autograd has saved, with the generators' states then.
    `began`: as of `ExecutedCall`. `refusal`: the first reason found. `is_dynamic`: a shape inside depends on data.
    `reads_data`: Python has read data. `python_reads`: what its forward reads besides its arguments.
    """

    def __init__(
        self, cls: type[torch.autograd.Function], args: tuple[Any, ...], states: Sequence[torch.Tensor]
    ) -> None:
        self.cls = cls
        self.args = args
        self.states = states
        self.began = torch.autograd._get_sequence_nr()  # its own node has just been made
        self.packed: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
        self.refusal: str | None = None
        self.is_dynamic = False
        self.reads_data = False
        self.python_reads = PythonReads(place_of(cls))
        self._is_graph = is_graph(cls)
        self._roles = RolesInside()
        self._made: set[int] = set()
        self._written: dict[int, torch.Tensor] = {}
        self._before: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        given = {id(tensor): tensor for tensor in tensors_in(args)}.values()
        for tensor in given:
            require_plain(tensor)
            if tensor.is_conj() or tensor.is_neg():
                self.refuse(CONJUGATE)
            if self._is_graph and run_in_cuda_graphs(tensor.device):
                self.refuse(RUN_AS_CUDA_GRAPH.format("it"))
        strange = next((arg for arg in args if not isinstance(arg, torch.Tensor | int | float | None)), None)
        if self._is_graph and strange is not None:
            self.refuse(f"torch.compile gives it a {type(strange).__name__}, and no call tells which")
        self._given = {storage_of(tensor) for tensor in given}
        if self._is_graph:
            self._written = {storage_of(tensor): tensor for tensor in written_by(cls, args)}
        else:
            self._before = [(tensor, tensor._version, tensor.detach().clone()) for tensor in given]

    def note(self, func: Any, given: tuple[Any, Any], result: Any) -> None:
        """Note an operator that has run inside."""
        read, outputs = list(tensors_in(given)), list(tensors_in(result))
        for tensor in (*read, *outputs):
            require_plain(tensor)
        if func in LIFTS:
            self._made.update(map(storage_of, read))
        refusal = refusal_of(func)
        if refusal == COLLECTIVE:
            self.refusal = COLLECTIVE
        elif refusal == OPAQUE and not (self._is_graph and func.namespace in OF_INDUCTOR):
            self.refuse(f"it calls {func}, which is no plain operator")
        elif reveals_data(func, given, outputs):
            self.reads_data = True
            self.refuse("reads data into Python")
        self.is_dynamic = self.is_dynamic or has_dynamic_shape(func, given)
        if self._is_graph:  # its own tensors are not seen when it makes them
            self._roles.note(func, given[0], outputs)
            return
        if not all(map(self._is_own, read)):
            self.refuse("it reads a tensor that is not among its arguments")
        for tensor in _overwritten(func, given):
            if storage_of(tensor) not in self._made:
                self._written.setdefault(storage_of(tensor), tensor)
        self._made.update({*map(storage_of, outputs)} - {*map(storage_of, read)})

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def finish(self, results: Sequence[Any]) -> list[torch.Tensor]:
        """The call has ended: look at what has become of its arguments and of state.

        Returns the tensors that it has written to, one for each storage.
        """
        for tensor, version, bits in self._before:
            if tensor._version != version or not _have_same_bits(bits, tensor.detach()):
                self._written.setdefault(storage_of(tensor), tensor)
        self._before.clear()
        changed = self.python_reads.changed()
        if changed is not None:
            self.refuse(f"it keeps state: {changed} changes")
        made = (*results, *(tensor for tensor, _ in self.packed))
        if not self._is_graph and not all(self._is_own(each) for each in made if isinstance(each, torch.Tensor)):
            self.refuse("it hands on a tensor that is not among its arguments")
        return list(self._written.values())

    def executed(
        self, results: Sequence[Any], written: Sequence[torch.Tensor], encode: Callable[[Any], Any]
    ) -> ExecutedCall:
        """The call, as an operator that may be one of the program. `encode` makes references of tensors."""
        saved = [tensor for tensor, _ in self.packed]
        func = FunctionOperator(self.cls, len(results), len(saved))
        needs = tuple(isinstance(each, torch.Tensor) and each.requires_grad for each in self.args)
        kwargs: tuple[tuple[str, Any], ...] = (("needs_input_grad", needs), ("autocast", autocast_now()))
        if self._is_graph:
            found = extents(saved, [*tensors_in(self.args), *tensors_in(results)])
            func = replace(func, roles=tuple(map(self._roles.of, saved)), fingerprint=fingerprint(self.cls))
            kwargs = (*kwargs, ("extents", found))
            saved = list(map(extended, saved, found))
        outputs = (*results, *saved)
        return ExecutedCall(
            func=func,
            args=encode(self.args),
            kwargs=kwargs,
            given=(self.args, {}),
            outputs=outputs,
            states=self.states,
            written=written,
            refusal=self.refusal,
            dynamic=self.is_dynamic,
            saved=len(saved),
            handed_on=small_integers(outputs) if self._is_graph or is_attention(self.cls) else frozenset(),
            python_reads=self.python_reads,
        )

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._given or storage_of(tensor) in self._made


def _overwritten(func: Any, given: tuple[Any, Any]) -> list[torch.Tensor]:
    """The tensors whose data the operator overwrites. Triton's interpreter points tensors at its arguments' memory."""
    packet = getattr(func, "overloadpacket", None)
    if packet is torch.ops.aten.set_:  # it gives a tensor other memory, and leaves all memory as it is
        return []
    if packet is torch.ops.aten.copy_ and are_one_view(*given[0][:2]):
        return []
    return written_tensors(func, given)


def _have_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """As `same_bits`, whatever the strides."""
    return all_same_bits((one.contiguous(), other.contiguous()) for one, other in pieces(a, b))
