"""How many bits a quantized element has."""

from typing import NamedTuple


class Width(NamedTuple):
    """Codes of `bits` bits, 4 or 8: integers in [-half, half - 1], stored plus `half`.

    `suffix`: how the names of codecs with such codes end.
    """

    bits: int
    suffix: str

    @property
    def half(self) -> int:
        """Half the number of codes."""
        return 1 << (self.bits - 1)

    def code_bytes(self, numel: int) -> int:
        """Return how many bytes `numel` codes take."""
        return (numel * self.bits + 7) // 8

    def code_slice(self, elements: slice) -> slice:
        """Return the bytes that hold the codes of a range of elements. The range must begin at a whole byte."""
        return slice(elements.start * self.bits // 8, self.code_bytes(elements.stop))


INT4, INT8 = Width(4, ""), Width(8, "8")
