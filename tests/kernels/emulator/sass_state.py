"""What a thread of a CUDA kernel knows while its machine code is walked through: registers, predicates, constants."""

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

PARAMETERS = 0x210  # where the parameters begin in constant bank 0, on sm_90
BLOCK_SIZE = 0x0
WORD = 0xFFFFFFFF
WARP = 32
_REGISTER = re.compile(r"([-~]?)\|?(U?R)(\d+|Z)\|?(?:\.\w+)*")
_CONSTANT = re.compile(r"([-~]?)c\[0x0\]\[(0x\w+|RZ)\]")

Number = int | None  # None: unknown


class State:
    """The registers, each of 32 bits, and predicates of one thread. A register that was never set is zero.

    `is_sure`: whether the guard of the current instruction is known to hold. If not, what it sets becomes unknown.
    """

    def __init__(self, thread: int, threads: int, block: int, arguments: Sequence[int]) -> None:
        self.special = {"SR_TID.X": thread, "SR_CTAID.X": block, "SR_CgaCtaId": 0}
        self.is_sure = True
        self._constants = bytearray(PARAMETERS + 8 * len(arguments))
        struct.pack_into("<I", self._constants, BLOCK_SIZE, threads)
        struct.pack_into(f"<{len(arguments)}q", self._constants, PARAMETERS, *arguments)
        self._registers: dict[str, Number] = {}
        self._predicates: dict[str, bool | None] = {"PT": True, "UPT": True}

    def predicate(self, name: str) -> bool | None:
        if name.startswith("!"):
            return known(lambda holds: not holds, self.predicate(name[1:]))
        return self._predicates.get(name)

    def value(self, operand: str) -> Number:
        """The 32 bits of a register, a constant or an immediate; `-` negates, `~` complements."""
        if found := _REGISTER.fullmatch(operand):
            sign, kind, number = found.groups()
            value = self._registers.get(kind + number, 0)
        elif found := _CONSTANT.fullmatch(operand):
            sign, value = found[1], self._constant(0 if found[2] == "RZ" else int(found[2], 16))
        elif operand.startswith(("0x", "-0x")):
            return int(operand, 16) & WORD
        else:
            return None  # a floating-point immediate
        return known(lambda bits: {"": bits, "-": -bits, "~": ~bits}[sign] & WORD, value)

    def _constant(self, offset: int) -> Number:
        if offset + 4 > len(self._constants):
            return None
        return struct.unpack_from("<I", self._constants, offset)[0]

    def wide(self, operand: str) -> Number:
        """The 64 bits of a pair of registers, or of a constant."""
        return known(lambda low, high: high << 32 | low, self.value(operand), self.value(next_of(operand)))

    def set(self, operand: str, value: Number) -> None:
        name = operand.split(".")[0]
        if not name.endswith("Z"):
            self._registers[name] = known(lambda bits: bits & WORD, value) if self.is_sure else None

    def set_wide(self, operand: str, value: Number) -> None:
        self.set(operand, value)
        self.set(next_of(operand), known(lambda bits: bits >> 32, value))

    def set_predicate(self, name: str, value: bool | None) -> None:
        if name not in ("PT", "UPT"):
            self._predicates[name] = value if self.is_sure else None


def known(function: Callable[..., Any], *values: Any) -> Any:
    """What the function makes of the values; None if one of them is unknown."""
    return None if None in values else function(*values)


def is_predicate(operand: str) -> bool:
    return re.fullmatch(r"!?U?P[\dT]+", operand) is not None


def next_of(operand: str) -> str:
    """The register or constant that holds the upper half of a 64-bit one."""
    if found := _CONSTANT.fullmatch(operand):
        return f"c[0x0][{int(found[2], 16) + 4:#x}]"
    name = operand.split(".")[0]
    return name if name.endswith("Z") else re.sub(r"\d+", lambda number: str(int(number[0]) + 1), name)
