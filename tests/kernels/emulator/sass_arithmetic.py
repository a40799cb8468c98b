"""What the instructions of CUDA kernels do to a thread's integers and predicates."""

import math
import struct
from collections.abc import Callable, Sequence

from sass_state import WORD, Number, State, is_predicate, negated


class Arithmetic(State):
    """A method for each instruction whose result is computed: `_lea` for LEA and, for a whole warp, ULEA.

    Methods take the modifiers, as ("WIDE", "U32"), the operands, and whether it is known that the instruction's guard
    holds; if not, what it sets becomes unknown.
    """

    def _mov(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        self.set(operands[0], self.value(operands[1]), known)

    def _hfma2(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        """With factors of zero, two immediate halves, the upper one first: a way to load a constant."""
        immediate = operands[1:3] == ("-RZ", "RZ") and not operands[3].startswith("R")
        halves = struct.pack("<ee", *map(float, operands[4:2:-1])) if immediate else b""
        self.set(operands[0], struct.unpack("<I", halves)[0] if immediate else None, known)

    def _r2ur(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        self.set(operands[-2], self.value(operands[-1]), known)

    def _s2r(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        self.set(operands[0], self.special[operands[1]], known)

    _s2ur = _s2r

    def _cs2r(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        (self.set if modifiers == ["32"] else self.set_wide)(operands[0], self.special[operands[1]], known)

    def _ldc(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        wide = modifiers == ["64"]
        value = self.wide(operands[1]) if wide else self.value(operands[1])
        (self.set_wide if wide else self.set)(operands[0], value, known)

    def _iadd3(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        """d, carries out ..., a, b, c; with X also two carries in."""
        carries = [operand for operand in operands[1:3] if is_predicate(operand)]
        rest = operands[1 + len(carries) :]
        self._add(operands[0], carries, rest[:3], rest[3:] if "X" in modifiers else (), known)

    def _viadd(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        self._add(operands[0], [], operands[1:3], (), known)

    def _add(
        self, target: str, carries: Sequence[str], terms: Sequence[str], carried: Sequence[str], known: bool
    ) -> None:
        # A negated term is its complement plus one, which decides about the carry.
        flipped = [term.replace("-", "~", 1) if term.startswith(("-R", "-UR", "-c")) else term for term in terms]
        values = [self.value(term) for term in flipped]
        bits = [self.predicate(each) for each in carried if each not in ("!PT", "!UPT")]
        if None in values or None in bits:
            total = None
        else:
            total = sum(values) + sum(bits) + sum(new != old for new, old in zip(flipped, terms, strict=True))
        self.set(target, total, known)
        for least, carry in enumerate(carries, 1):  # three terms may carry two
            self.set_predicate(carry, None if total is None else total >> 32 >= least, known)

    def _imad(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        carries = [operand for operand in operands[1:2] if is_predicate(operand)]
        target, (a, b, c, *carried) = operands[0], operands[1 + len(carries) :]
        wide, signed = "WIDE" in modifiers or "HI" in modifiers, "U32" not in modifiers
        x, y = self.value(a), self.value(b)
        z = self.wide(c) if wide else self.value(c)
        bits = [self.predicate(each) for each in carried]
        if None in (x, y, z, *bits):
            total = None
        else:
            total = (_signed(x) * _signed(y) if wide and signed else x * y) + z + sum(bits)
        for carry in carries:
            self.set_predicate(carry, None if total is None else total >> 64 != 0, known)
        if "WIDE" in modifiers:
            self.set_wide(target, total, known)
        elif "HI" in modifiers:
            self.set(target, None if total is None else total >> 32, known)
        else:
            self.set(target, total, known)

    def _lea(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        """d, [carry out], a, b, shift; with HI the word above a is ahead of the shift, with X a carry in at the end."""
        carries = [operand for operand in operands[1:2] if is_predicate(operand)]
        target, rest = operands[0], list(operands[1 + len(carries) :])
        carried = self.predicate(rest.pop()) if "X" in modifiers else False
        a, b, shift = self.value(rest[0]), self.value(rest[1]), int(rest[-1], 16)
        if "SX32" in modifiers:
            above = None if a is None else _signed(a) >> 31
        else:
            above = self.value(rest[2]) if "HI" in modifiers else 0
        if None in (a, b, above, carried):
            total = None
        elif "HI" in modifiers:
            total = (((above << 32 | a) << shift) >> 32 & WORD) + b + carried
        else:
            total = (a << shift & WORD) + b + carried
        self.set(target, total, known)
        for carry in carries:
            self.set_predicate(carry, None if total is None else total > WORD, known)

    def _shf(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        low, shift, high = map(self.value, operands[1:4])
        if "HI" not in modifiers and modifiers[0] == "L":
            high = 0
        if "HI" in modifiers and modifiers[0] == "R":
            low = 0
        if None in (low, shift, high):
            self.set(operands[0], None, known)
            return
        bits = 64 if "U64" in modifiers or "S64" in modifiers else 32
        shift = shift % bits if "W" in modifiers else min(shift, bits)
        both = (_signed(high) if "S32" in modifiers or "S64" in modifiers else high) << 32 | low
        both = both << shift if modifiers[0] == "L" else both >> shift
        self.set(operands[0], both >> 32 if "HI" in modifiers else both, known)

    def _lop3(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        predicates = [operand for operand in operands[:1] if is_predicate(operand)]
        target, a, b, c, table = operands[len(predicates) : len(predicates) + 5]
        result = _lookup(int(table, 16), [self.value(each) for each in (a, b, c)], WORD)
        self.set(target, result, known)
        for name in predicates:
            self.set_predicate(name, None if result is None else result != 0, known)

    def _plop3(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        sources = [_bit(self.predicate(each)) for each in operands[2:5]]
        for name, table in zip(operands[:2], operands[5:7], strict=True):
            result = _lookup(int(table, 16), sources, 1)
            self.set_predicate(name, None if result is None else bool(result), known)

    def _isetp(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        comparison, how = modifiers[0], modifiers[2] if modifiers[1] == "U32" else modifiers[1]
        a, b = self.value(operands[2]), self.value(operands[3])
        if a is None or b is None:
            result = None
        else:
            if "U32" not in modifiers:
                a, b = _signed(a), _signed(b)
            result = _COMPARISONS[comparison](a, b)
            if "EX" in modifiers and a == b:  # equal upper words: the lower ones decide
                result = self.predicate(operands[5])
        other = self.predicate(operands[4])
        self.set_predicate(operands[0], _JOINED[how](result, other), known)
        self.set_predicate(operands[1], _JOINED[how](negated(result), other), known)

    def _sel(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        chosen, a, b = self.predicate(operands[3]), self.value(operands[1]), self.value(operands[2])
        value = (a if a == b else None) if chosen is None else a if chosen else b
        self.set(operands[0], value, known)

    _fsel = _sel

    def _prmt(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        a, chosen, b = map(self.value, operands[1:4])
        if None in (a, chosen, b) or modifiers:
            self.set(operands[0], None, known)
            return
        both, value = b << 32 | a, 0
        for i in range(4):
            index = chosen >> 4 * i & 15
            byte = both >> 8 * (index & 7) & 255
            value |= (255 * (byte >> 7) if index & 8 else byte) << 8 * i
        self.set(operands[0], value, known)

    def _p2r(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        mask, value = int(operands[3], 16), self.value(operands[2])
        bits = [self.predicate(f"P{i}") if mask >> i & 1 else False for i in range(7)]
        if value is not None and None not in bits:
            value = value & ~mask | sum(bit << i for i, bit in enumerate(bits))
        self.set(operands[0], value, known and None not in bits)

    def _r2p(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        value, mask = self.value(operands[1]), int(operands[2], 16)
        for i in range(7):
            if mask >> i & 1:
                self.set_predicate(f"P{i}", None if value is None else bool(value >> i & 1), known)

    def _vimnmx(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        *values, least = operands[1:]
        numbers, least = [self.value(each) for each in values], self.predicate(least)
        if None in numbers or least is None or {"U16x2", "S16x2"} & set(modifiers):
            self.set(operands[0], None, known)
            return
        key = None if "U32" in modifiers else _signed
        self.set(operands[0], (min if least else max)(numbers, key=key), known)

    _vimnmx3 = _vimnmx

    def _viaddmnmx(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        a, b, bound = map(self.value, operands[1:4])
        least = self.predicate(operands[4])
        if None in (a, b, bound, least):
            self.set(operands[0], None, known)
            return
        key = None if "U32" in modifiers else _signed
        self.set(operands[0], (min if least else max)((a + b & WORD, bound), key=key), known)

    def _brev(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        value = self.value(operands[1])
        self.set(operands[0], None if value is None else int(f"{value:032b}"[::-1], 2), known)

    def _popc(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        value = self.value(operands[1])
        self.set(operands[0], None if value is None else value.bit_count(), known)

    def _flo(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        value = self.value(operands[-1])
        if value is not None:
            highest = value.bit_length() - 1
            value = WORD if highest < 0 else 31 - highest if "SH" in modifiers else highest
        self.set(operands[0], value, known)

    def _iabs(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        value = self.value(operands[1])
        self.set(operands[0], None if value is None else abs(_signed(value)), known)

    # Integer divisions begin with the reciprocal of a float, which they correct afterwards.

    def _i2f(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        wide = "U64" in modifiers or "S64" in modifiers
        value = self.wide(operands[1]) if wide else self.value(operands[1])
        self.set(operands[0], None if value is None else _float_bits(value), known)

    def _mufu(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        value = self.value(operands[1])
        usable = value is not None and modifiers == ["RCP"] and 0 < value < 0x7F000000
        self.set(operands[0], _float_bits(1 / _float(value)) if usable else None, known)

    def _f2i(self, modifiers: Sequence[str], operands: Sequence[str], known: bool) -> None:
        value = self.value(operands[1])
        result = None if value is None or value >= 0x7F000000 else math.trunc(_float(value))
        (self.set_wide if "U64" in modifiers or "S64" in modifiers else self.set)(operands[0], result, known)


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


def both(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def _any(a: bool | None, b: bool | None) -> bool | None:
    return negated(both(negated(a), negated(b)))


def _bit(a: bool | None) -> Number:
    return None if a is None else int(a)


_JOINED = {"AND": both, "OR": _any}


def _lookup(table: int, sources: Sequence[Number], mask: int) -> Number:
    """What a three-input table makes of the sources, bit by bit; known if no unknown source matters."""
    rows = [row for row in range(8) if table >> row & 1]
    for position, source in enumerate(sources):
        if source is None:
            flipped = 4 >> position
            if any((table >> (row ^ flipped) & 1) != (table >> row & 1) for row in range(8)):
                return _masked(table, sources, mask)
    value = 0
    for row in rows:
        each = mask
        for source, bit in zip(sources, (4, 2, 1), strict=True):
            if source is not None:
                each &= source if row & bit else ~source
        value |= each
    return value & mask


def _masked(table: int, sources: Sequence[Number], mask: int) -> Number:
    """The same where an unknown source may matter: known if the others decide every bit, as in x & 0."""
    unknown = [position for position, source in enumerate(sources) if source is None]
    results = {
        _lookup(table, [each if source is None else source for source, each in zip(sources, guess, strict=True)], mask)
        for guess in ([bits >> position & 1 and mask for position in range(3)] for bits in range(8))
        if unknown
    }
    return results.pop() if len(results) == 1 else None


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]
