"""What the instructions of CUDA kernels do to a thread's integers and predicates."""

import operator
import struct
from collections.abc import Callable, Sequence
from itertools import takewhile

from sass_state import WORD, Number, State, is_predicate, known


class Arithmetic(State):
    """A method for each instruction whose result is computed: `_lea` for LEA and, for a whole warp, ULEA.

    Methods take the modifiers, as ("WIDE", "U32"), and the operands.
    """

    def _mov(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        self.set(operands[0], self.value(operands[1]))

    def _r2ur(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        self.set(operands[-2], self.value(operands[-1]))

    def _hfma2(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        """With factors of zero, two immediate halves, the upper one first: a way to load a constant."""
        is_constant = operands[1:3] == ("-RZ", "RZ") and not operands[3].startswith("R")
        halves = struct.pack("<ee", *map(float, operands[4:2:-1])) if is_constant else b""
        self.set(operands[0], struct.unpack("<I", halves)[0] if is_constant else None)

    def _s2r(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        self.set(operands[0], self.special[operands[1]])

    _s2ur = _s2r

    def _ldc(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        if modifiers == ["64"]:
            self.set_wide(operands[0], self.wide(operands[1]))
        else:
            self.set(operands[0], self.value(operands[1]))

    def _iadd3(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        """d, carries out ..., a, b, c; with X also two carries in."""
        target, carries, terms = _split(operands)
        carried = [self.predicate(each) for each in terms[3:] if each != "!PT" and each != "!UPT"]
        # A negated term is its complement plus one, which decides about the carry.
        flipped = [term.replace("-", "~", 1) if term.startswith(("-R", "-UR", "-c")) else term for term in terms[:3]]
        ones = sum(new != old for new, old in zip(flipped, terms, strict=False))
        total = known(lambda *bits: sum(bits), *map(self.value, flipped), *carried, ones)
        self.set(target, total)
        for least, carry in enumerate(carries, 1):  # three terms may carry two
            self.set_predicate(carry, known(lambda bits, least=least: bits >> 32 >= least, total))

    _viadd = _iadd3

    def _imad(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        target, carries, (a, b, c, *carried) = _split(operands)
        is_wide = "WIDE" in modifiers or "HI" in modifiers
        number = _signed if is_wide and "U32" not in modifiers else int
        total = known(
            lambda a, b, c, *bits: number(a) * number(b) + c + sum(bits),
            *(self.value(a), self.value(b), self.wide(c) if is_wide else self.value(c)),
            *map(self.predicate, carried),
        )
        for carry in carries:
            self.set_predicate(carry, known(lambda bits: bits >> 64 != 0, total))
        if "WIDE" in modifiers:
            self.set_wide(target, total)
        else:
            self.set(target, known(lambda bits: bits >> 32, total) if "HI" in modifiers else total)

    def _lea(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        """d, [carry out], a, b, shift; with HI the word above a is ahead of the shift, with X a carry in at the end."""
        target, carries, rest = _split(operands)
        carried = self.predicate(rest.pop()) if "X" in modifiers else False
        a, b, *above = map(self.value, rest[:-1])
        if "SX32" in modifiers:
            above = [known(lambda a: _signed(a) >> 31, a)]
        shift, down = int(rest[-1], 16), 32 if "HI" in modifiers else 0
        shifted = known(lambda a, above=0: (above << 32 | a) << shift >> down & WORD, a, *above)
        total = known(lambda *bits: sum(bits), shifted, b, carried)
        self.set(target, total)
        for carry in carries:
            self.set_predicate(carry, known(lambda bits: bits > WORD, total))

    def _shf(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        low, shift, high = operands[1:4]
        is_left, is_high = modifiers[0] == "L", "HI" in modifiers
        if is_left and not is_high:
            high = "RZ"
        if is_high and not is_left:
            low = "RZ"

        def shifted(low: int, shift: int, high: int) -> int:
            bits = 64 if "U64" in modifiers or "S64" in modifiers else 32
            shift = shift % bits if "W" in modifiers else min(shift, bits)
            both = (_signed(high) if "S32" in modifiers or "S64" in modifiers else high) << 32 | low
            both = both << shift if is_left else both >> shift
            return both >> 32 if is_high else both

        self.set(operands[0], known(shifted, *map(self.value, (low, shift, high))))

    def _lop3(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        predicates = [operand for operand in operands[:1] if is_predicate(operand)]
        target, a, b, c, table = operands[len(predicates) : len(predicates) + 5]
        result = known(_lookup(table), *map(self.value, (a, b, c)))
        self.set(target, result)
        for name in predicates:
            self.set_predicate(name, known(bool, result))

    def _plop3(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        sources = [known(lambda holds: WORD * holds, self.predicate(each)) for each in operands[2:5]]
        for name, table in zip(operands[:2], operands[5:7], strict=True):
            self.set_predicate(name, known(lambda *bits, table=table: bool(_lookup(table)(*bits)), *sources))

    def _isetp(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        comparison, *rest = modifiers
        number = int if "U32" in rest else _signed
        join = operator.and_ if "AND" in rest else operator.or_
        lower = self.predicate(operands[5]) if "EX" in rest else False

        def compared(a: int, b: int, lower: bool) -> bool:
            if "EX" in rest and a == b:  # equal upper words: the lower ones decide
                return lower
            return getattr(operator, comparison.lower())(number(a), number(b))

        result, other = known(compared, *map(self.value, operands[2:4]), lower), self.predicate(operands[4])
        self.set_predicate(operands[0], known(join, result, other))
        self.set_predicate(operands[1], known(lambda result, other: join(not result, other), result, other))

    def _sel(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        chosen = known(lambda holds: operands[1 if holds else 2], self.predicate(operands[3]))
        self.set(operands[0], known(self.value, chosen))

    def _prmt(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        def chosen(a: int, places: int, b: int) -> int:
            both, value = b << 32 | a, 0
            for i in range(4):
                index = places >> 4 * i & 15
                byte = both >> 8 * (index & 7) & 255
                value |= (255 * (byte >> 7) if index & 8 else byte) << 8 * i
            return value

        self.set(operands[0], known(chosen, *map(self.value, operands[1:4])))

    def _r2p(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        value, mask = self.value(operands[1]), int(operands[2], 16)
        for i in range(7):
            if mask >> i & 1:
                self.set_predicate(f"P{i}", known(lambda bits, i=i: bool(bits >> i & 1), value))

    def _vimnmx(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        is_packed = any(each.endswith("16x2") for each in modifiers)
        values = map(self.value, operands[1:-1])
        self.set(operands[0], None if is_packed else _extreme(modifiers, self.predicate(operands[-1]), *values))

    def _viaddmnmx(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        total = known(lambda a, b: a + b & WORD, *map(self.value, operands[1:3]))
        self.set(operands[0], _extreme(modifiers, self.predicate(operands[4]), total, self.value(operands[3])))

    def _brev(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        self.set(operands[0], known(lambda bits: int(f"{bits:032b}"[::-1], 2), self.value(operands[1])))

    def _flo(self, modifiers: Sequence[str], operands: Sequence[str]) -> None:
        """The place of the highest one among the bits; with SH its distance from the top. Without one: all ones."""

        def place(bits: int) -> int:
            return 32 - bits.bit_length() if bits and "SH" in modifiers else bits.bit_length() - 1

        self.set(operands[0], known(place, self.value(operands[-1])))


def _split(operands: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The register that is set, the predicates that get carries, and the rest."""
    carries = list(takewhile(is_predicate, operands[1:]))
    return operands[0], carries, list(operands[1 + len(carries) :])


def _extreme(modifiers: Sequence[str], is_least: bool | None, *values: Number) -> Number:
    """The least of the values, or the greatest."""
    key = int if "U32" in modifiers else _signed
    return known(lambda is_least, *each: (min if is_least else max)(each, key=key), is_least, *values)


def _lookup(table: str) -> Callable[[int, int, int], int]:
    """What a three-input table makes of three numbers, bit by bit."""
    rows = [row for row in range(8) if int(table, 16) >> row & 1]

    def looked_up(*numbers: int) -> int:
        value = 0
        for row in rows:
            a, b, c = (number if row & bit else ~number for number, bit in zip(numbers, (4, 2, 1), strict=True))
            value |= a & b & c
        return value & WORD

    return looked_up


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value
