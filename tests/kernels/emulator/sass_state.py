"""What a thread of a CUDA kernel knows while its machine code is walked through: registers, predicates, constants."""

import re
import struct
from collections.abc import Sequence

PARAMETERS = 0x210  # where the parameters begin in constant bank 0, on sm_90
BLOCK_SIZE = 0x0
WORD = 0xFFFFFFFF
WARP = 32
_REGISTER = re.compile(r"([-~]?)\|?(U?R)(\d+|Z)\|?(?:\.\w+)*")
_CONSTANT = re.compile(r"([-~]?)c\[0x0\]\[(0x\w+|RZ)\]")

Number = int | None  # None: unknown


class State:
    """The registers, each of 32 bits, and predicates of one thread. What was never set is zero, or false."""

    def __init__(self, thread: int, threads: int, block: int, arguments: Sequence[int]) -> None:
        self.special = {"SR_TID.X": thread, "SR_CTAID.X": block, "SRZ": 0, "SR_CgaCtaId": 0}
        self._constants = bytearray(PARAMETERS + 8 * len(arguments))
        struct.pack_into("<I", self._constants, BLOCK_SIZE, threads)
        struct.pack_into(f"<{len(arguments)}q", self._constants, PARAMETERS, *arguments)
        self._registers: dict[str, Number] = {}
        self._predicates: dict[str, bool | None] = {}

    def predicate(self, name: str) -> bool | None:
        if name.startswith("!"):
            return negated(self.predicate(name[1:]))
        return True if name in ("PT", "UPT") else self._predicates.get(name)

    def value(self, operand: str) -> Number:
        """The 32 bits of a register, a constant or an immediate; `-` negates, `~` complements."""
        if found := _REGISTER.fullmatch(operand):
            sign, kind, number = found.groups()
            value = self._registers.get(kind + number, 0)  # nothing depends on one that was never set
        elif found := _CONSTANT.fullmatch(operand):
            sign, value = found[1], self._constant(0 if found[2] == "RZ" else int(found[2], 16))
        elif operand.startswith(("0x", "-0x")):
            return int(operand, 16) & WORD
        else:
            return None  # a floating-point immediate
        if value is None:
            return None
        return {"": value, "-": -value, "~": ~value}[sign] & WORD

    def _constant(self, offset: int) -> Number:
        if offset + 4 > len(self._constants):
            return None
        return struct.unpack_from("<I", self._constants, offset)[0]

    def wide(self, operand: str) -> Number:
        """The 64 bits of a pair of registers, or of a constant."""
        low, high = self.value(operand), self.value(next_of(operand))
        return None if low is None or high is None else high << 32 | low

    def set(self, operand: str, value: Number, known: bool) -> None:
        """Set a register; one that is written under an unknown predicate becomes unknown."""
        name = operand.split(".")[0]
        if not name.endswith("Z"):
            self._registers[name] = None if value is None or not known else value & WORD

    def set_wide(self, operand: str, value: Number, known: bool) -> None:
        self.set(operand, value, known)
        self.set(next_of(operand), None if value is None else value >> 32, known)

    def set_predicate(self, name: str, value: bool | None, known: bool) -> None:
        if name not in ("PT", "UPT"):
            self._predicates[name] = value if known else None


def negated(a: bool | None) -> bool | None:
    return None if a is None else not a


def is_predicate(operand: str) -> bool:
    return re.fullmatch(r"!?U?P[\dT]+", operand) is not None


def next_of(operand: str) -> str:
    """The register or constant that holds the upper half of a 64-bit one."""
    if found := _CONSTANT.fullmatch(operand):
        return f"c[0x0][{int(found[2], 16) + 4:#x}]"
    name = operand.split(".")[0]
    return name if name.endswith("Z") else re.sub(r"\d+", lambda number: str(int(number[0]) + 1), name)
