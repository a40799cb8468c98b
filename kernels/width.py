"""How many bits a quantized element has."""

from typing import NamedTuple


class Width(NamedTuple):
    """Codes of so many `bits`, 4 or 8: integers in [-half, half - 1], in memory with `half` added.

    `suffix` is what the names of such codecs end with.
    """

    bits: int
    suffix: str

    @property
    def half(self) -> int:
        """Half of how many codes there are."""
        return 1 << (self.bits - 1)

    def code_bytes(self, numel: int) -> int:
        """Return how many bytes so many codes take."""
        return (numel * self.bits + 7) // 8

    def code_slice(self, elements: slice) -> slice:
        """Return where the codes of a range of elements lie, which begins at a whole byte."""
        return slice(elements.start * self.bits // 8, self.code_bytes(elements.stop))


INT4, INT8 = Width(4, ""), Width(8, "8")
