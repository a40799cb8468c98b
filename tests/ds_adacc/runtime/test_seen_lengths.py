"""A block is followed where a length is beyond those at which it was seen."""

from types import SimpleNamespace

from ds_adacc.execute.block import Block
from ds_adacc.plan.symbolic_types import SymbolicType
from ds_adacc.runtime.seen_lengths import SeenLengths


def test_lengths_between_those_seen_are_covered_for_this_block_and_program():
    seen, block = SeenLengths(), Block("block")
    program, another = (SymbolicType(SimpleNamespace(examples=1), None) for _ in range(2))
    assert not seen.cover(program, block, (4, 9))
    seen.add(program, block, (4, 9))
    seen.add(program, block, (2, 20))
    for lengths in ((4, 9), (2, 20), (3, 12), (2, 9), (4, 20)):
        assert seen.cover(program, block, lengths)
    for lengths in ((1, 9), (5, 9), (4, 8), (4, 21)):
        assert not seen.cover(program, block, lengths)
    assert not seen.cover(another, block, (4, 9))
    assert not seen.cover(program, Block("another"), (4, 9))


def test_what_was_seen_counts_until_the_program_has_another_example():
    seen, block, examples = SeenLengths(), Block("block"), SimpleNamespace(examples=2)
    program = SymbolicType(examples, None)
    seen.add(program, block, (4,))
    examples.examples = 3
    assert not seen.cover(program, block, (4,))
    seen.add(program, block, (6,))
    assert seen.cover(program, block, (6,)) and not seen.cover(program, block, (5,))


def test_calls_with_more_lengths_are_seen_by_themselves():
    """Inputs that share a storage have a distance too."""
    seen, block, program = SeenLengths(), Block("block"), SymbolicType(SimpleNamespace(examples=1), None)
    seen.add(program, block, (4,))
    assert not seen.cover(program, block, (4, 64))
    seen.add(program, block, (4, 64))
    assert seen.cover(program, block, (4, 64))


def test_a_program_that_is_not_known_is_not_covered():
    seen, block = SeenLengths(), Block("block")
    seen.add(None, block, (4,))
    assert not seen.cover(None, block, (4,))


def test_neither_programs_nor_blocks_are_kept_alive(uncollected):
    seen, block, program = SeenLengths(), Block("block"), SymbolicType(SimpleNamespace(examples=1), None)
    other = Block("another")
    seen.add(program, block, (4,))
    seen.add(program, other, (4,))
    del other
    assert len(seen._seen[program]) == 1
    del program
    assert not seen._seen
