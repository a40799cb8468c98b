"""Count the instructions that a warp issues: walk through a kernel's machine code with a launch's real arguments.

Integers, addresses and predicates are computed. What comes from memory is unknown, and so is all floating-point
arithmetic. So every loop and every branch that depends on arguments and on the
thread's index is taken as a GPU would take it, and every instruction on that way counts as one, predicated off or not.

Of a branch that depends on data, the way is taken that calls no subroutine: `__frcp_rn` has one for numbers that are
subnormal or have a subnormal reciprocal. Where nothing is called, a forward branch is not taken, so that all that it
might skip is counted; a backward one is an error.
"""

import re
from collections.abc import Sequence

from sass import Instruction
from sass_arithmetic import Arithmetic
from sass_state import WARP, is_predicate, known, next_of

MOST = 200_000  # instructions of a thread; more are an endless loop


class SassError(Exception):
    """The walk met an instruction that it does not know, or a branch that depends on data."""


def count_warps(
    instructions: Sequence[Instruction], threads: int, block: int, arguments: Sequence[int]
) -> list[list[Instruction]]:
    """Return what the first thread of each warp of a block executes: a list of instructions for each warp."""
    return [_Thread(instructions, thread, threads, block, arguments).walk() for thread in range(0, threads, WARP)]


def list_stores(
    instructions: Sequence[Instruction], threads: int, block: int, arguments: Sequence[int], thread: int
) -> list[tuple[int | None, int]]:
    """Return the (address, bytes) of what a thread of a block stores to global memory, in order."""
    walker = _Thread(instructions, thread, threads, block, arguments)
    walker.walk()
    return walker.stores


class _Thread(Arithmetic):
    """One thread, and where it is in the program."""

    def __init__(self, instructions: Sequence[Instruction], *launch: object) -> None:
        super().__init__(*launch)
        self._instructions = instructions
        self._at = {each.address: position for position, each in enumerate(instructions)}
        self._position = 0
        self.stores: list[tuple[int | None, int]] = []

    def walk(self) -> list[Instruction]:
        """Return the instructions that the thread executes, from the first to EXIT."""
        executed: list[Instruction] = []
        while len(executed) < MOST:
            instruction = self._instructions[self._position]
            executed.append(instruction)
            self._position += 1
            name, *_ = instruction.opcode
            conditions = [instruction.guard] if instruction.guard else []
            if name == "BRA":
                conditions += instruction.operands[:-1]
            taken = known(lambda *each: all(each), *map(self.predicate, conditions))
            if name in ("BRA", "EXIT"):
                if self._jumps(instruction, taken):
                    if name == "EXIT":
                        return executed
                    self._position = self._at[int(instruction.operands[-1], 16)]
            elif taken is not False:
                self.is_sure = taken is True
                self._execute(instruction)
        raise SassError(f"no end after {MOST} instructions")

    # ---- branches ----

    def _jumps(self, instruction: Instruction, taken: bool | None) -> bool:
        if taken is not None:
            return taken
        if instruction.opcode[0] == "BRA":
            target = int(instruction.operands[-1], 16)
            if self._calls(self._position):
                return True
            if self._calls(self._at[target]) or target > instruction.address:
                return False
        raise SassError(f"depends on data: {instruction}")

    def _calls(self, position: int) -> bool:
        """Whether the straight code at a position calls a subroutine."""
        for instruction in self._instructions[position:]:
            if instruction.opcode[0] == "CALL":
                return True
            if instruction.opcode[0] in ("BRA", "EXIT", "RET", "BSYNC"):
                return False
        return False

    def _execute(self, instruction: Instruction) -> None:
        name, *modifiers = instruction.opcode
        if name == "STG":
            self._store(instruction)
        method = "_" + name.lower()
        compute = getattr(Arithmetic, method, None) or getattr(Arithmetic, method.replace("_u", "_", 1), None)
        if name in _UNKNOWN:
            self._forget(instruction)
        elif compute is not None:  # ULEA is LEA for a whole warp
            compute(self, modifiers, instruction.operands)
        elif name not in _WITHOUT_RESULT:
            raise SassError(f"unknown instruction: {instruction}")

    def _store(self, instruction: Instruction) -> None:
        base, offset = re.fullmatch(r"desc\[UR\d+\]\[(R\d+)\.64(?:\+(-?0x\w+))?\]", instruction.operands[0]).groups()
        place = known(lambda begin: begin + int(offset or "0", 16), self.wide(base))
        self.stores.append((place, next((_BYTES[each] for each in instruction.opcode if each in _BYTES), 4)))

    def _forget(self, instruction: Instruction) -> None:
        """Make unknown what the instruction sets: predicates, and one register or several."""
        name, *modifiers = instruction.opcode
        count = 2 if name.startswith("D") else {"64": 2, "128": 4}.get(modifiers[-1] if modifiers else "", 1)
        for operand in instruction.operands:
            if not is_predicate(operand):
                break
            self.set_predicate(operand, None)
        for _ in range(0 if "SETP" in name or name == "FCHK" else count):
            self.set(operand, None)
            operand = next_of(operand)


_BYTES = {"U8": 1, "U16": 2, "64": 8, "128": 16}
_WITHOUT_RESULT = {
    *("NOP", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "YIELD", "BAR", "DEPBAR", "MEMBAR", "ERRBAR", "CCTL"),
    *("ST", "STG", "STS", "STL", "RED", "REDG"),
}
_UNKNOWN = {
    *("LD", "LDG", "LDS", "LDL", "ATOM", "ATOMG", "ATOMS", "SHFL", "VOTE", "VOTEU"),
    *("FADD", "FMUL", "FFMA", "FMNMX", "FSET", "FSETP", "FCHK", "FRND", "F2F", "F2FP", "FSEL", "I2FP", "MUFU"),
    *("HADD2", "HMUL2", "HMNMX2", "VHMNMX", "HSETP2", "DADD", "DSETP"),
}
