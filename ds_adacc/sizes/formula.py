"""How a whole number of a program follows the sizes of its inputs: found from a few examples, exactly."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

_MOST_FACTORS = 3  # batch x length x length, as in written-out attention
_MOST_VARIABLES = 4  # more would fit anything to a few examples

# A variable, by index, or the total of two: two inputs that are joined are as long as both.
Total = tuple[int, ...]


@dataclass(frozen=True)
class Formula:
    """`factor` times the product of these variables and totals (one may occur several times), plus `offset`."""

    factor: Fraction
    totals: tuple[Total, ...]
    offset: Fraction

    def at(self, sizes: Sequence[int]) -> int | None:
        """The number at these values of the variables; None if it is not whole."""
        number = self.factor * _product(self.totals, sizes) + self.offset
        return int(number) if number.denominator == 1 else None


class Variables:
    """The sizes that differ between examples. Sizes that agree in all examples are one variable.

    `examples`: the sizes of each example, in the same order.
    """

    def __init__(self, examples: Sequence[Sequence[int]]) -> None:
        self._columns = list(zip(*examples, strict=True))
        self.seen = list(dict.fromkeys(column for column in self._columns if len(set(column)) > 1))

    def values_at(self, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """The values of the variables at these sizes.

        None if sizes differ here that were equal in all examples, or one differs that never did: the examples do not
        tell what follows.
        """
        if len(sizes) != len(self._columns) or len(self.seen) > _MOST_VARIABLES:
            return None
        values: dict[tuple[int, ...], int] = {}
        for column, size in zip(self._columns, sizes, strict=True):
            expected = values.setdefault(column, size) if len(set(column)) > 1 else column[0]
            if size != expected:
                return None
        return tuple(values[column] for column in self.seen)

    def fit(self, numbers: Sequence[int]) -> Formula | None:
        """The simplest formula that gives each example's number; None if there is none.

        A product is simpler than a line, fewer factors are simpler, and variables are simpler than totals. With two
        examples, a line fits any two numbers.
        """
        lines = (_line(numbers, chosen, values) for chosen, values in self._products)
        return self.proportional(numbers) or next(filter(None, lines), None)

    def proportional(self, numbers: Sequence[int]) -> Formula | None:
        """The simplest formula of these that is constant or a product; None if there is none."""
        if len(set(numbers)) == 1:
            return Formula(Fraction(0), (), Fraction(numbers[0]))
        for chosen, values in self._products:
            if values[0] and all(n * values[0] == numbers[0] * v for n, v in zip(numbers, values, strict=True)):
                return Formula(Fraction(numbers[0], values[0]), chosen, Fraction(0))
        return None

    @functools.cached_property
    def _products(self) -> list[tuple[tuple[Total, ...], list[int]]]:
        """The products of the variables, the simplest first, with the value of each in each example."""
        examples = list(zip(*self.seen, strict=True))
        return [(chosen, [_product(chosen, sizes) for sizes in examples]) for chosen in _products(len(self.seen))]


def _line(numbers: Sequence[int], chosen: tuple[Total, ...], values: Sequence[int]) -> Formula | None:
    low, high = min(range(len(values)), key=values.__getitem__), max(range(len(values)), key=values.__getitem__)
    if values[low] == values[high]:
        return None
    factor = Fraction(numbers[high] - numbers[low], values[high] - values[low])
    offset = numbers[low] - factor * values[low]
    fits = all(factor * value + offset == number for number, value in zip(numbers, values, strict=True))
    return Formula(factor, chosen, offset) if fits else None


def _products(variables: int) -> Iterator[tuple[Total, ...]]:
    """What each product is of, the simplest first."""
    single = [(index,) for index in range(variables)]
    return itertools.chain(_with_repeats(single), _with_a_total(single))


def _with_repeats(of: Sequence[Total]) -> Iterator[tuple[Total, ...]]:
    for factors in range(1, _MOST_FACTORS + 1):
        yield from itertools.combinations_with_replacement(of, factors)


def _with_a_total(single: Sequence[Total]) -> Iterator[tuple[Total, ...]]:
    """Products of one total of two variables, perhaps several times, and of single ones."""
    for one, other in itertools.combinations(single, 2):
        total = one + other
        yield from (chosen for chosen in _with_repeats([total, *single]) if total in chosen)


def _product(totals: tuple[Total, ...], sizes: Sequence[int]) -> int:
    return math.prod(sum(sizes[variable] for variable in total) for total in totals)
