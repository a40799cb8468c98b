"""Which saved tensors backward gets a copy of.

Backward of a Function may write to what it has saved, as that of Liger-Kernel's SwiGLU does, which puts its gradient
there. In plain autograd nobody reads the tensor after that. Here something might be rebuilt from it (Rule E15).
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_adacc.program.arguments import ValueRef
from ds_adacc.program.recorded_op import RecordedOp
from ds_adacc.program.recording import Position, Recording


def copied(recording: Recording, replayed: Sequence[int]) -> frozenset[int]:
    """The positions of the pack hook whose tensors are copied for backward, which replays these operators, sorted.

    Backward visits the operators in reverse. So these are the tensors from which something is rebuilt for an operator
    that comes before the one that saves them. In a block of norms, attention and an MLP there are none.
    """
    positions = [(n, p, p.ref.index) for n, p in enumerate(recording.positions) if isinstance(p.ref, ValueRef)]
    savers = {number: _saver(recording, position) for number, position, _ in positions}
    if not any(savers.values()):
        return frozenset()
    first: dict[int, int] = {}  # by value, the first operator whose backward needs it, or something rebuilt from it
    of_rebuilt: dict[int, int] = {}  # the same without the value itself
    for _, position, value in positions:
        first[value] = min(position.op, first.get(value, len(recording.ops)))
    for op in (recording.ops[index] for index in reversed(replayed)):  # what reads a value comes after what makes it
        needed = min((first[made] for made in op.outputs if made in first), default=len(recording.ops))
        for need in op.needs:
            for known in (first, of_rebuilt):
                known[need] = min(needed, known.get(need, len(recording.ops)))
    found = ((number, value, savers[number]) for number, _, value in positions)
    return frozenset(n for n, value, op in found if op is not None and of_rebuilt.get(value, op.index) < op.index)


def _saver(recording: Recording, position: Position) -> RecordedOp | None:
    """The operator that saves the tensor, if its backward is not torch's own."""
    op = recording.ops[position.op] if position.op < len(recording.ops) else None
    return op if op is not None and op.python_reads is not None else None
