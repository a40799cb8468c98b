"""A block is followed where a length is beyond those at which it was seen. What was seen is not kept without end."""

from types import SimpleNamespace

import pytest
from any_size import Training

from ds_adacc.execute.block import Block
from ds_adacc.runtime import seen_programs
from ds_adacc.runtime.seen_programs import SeenLengths
from ds_adacc.sizes.symbolic_types import SymbolicType


def test_lengths_between_those_seen_are_covered_for_this_block_and_program():
    seen, block = SeenLengths(), Block("block")
    program, another = (SymbolicType(SimpleNamespace(examples=1), None) for _ in range(2))
    assert not seen.cover(program, block, "way", (4, 9))
    seen.add(program, block, "way", (4, 9))
    seen.add(program, block, "way", (2, 9))
    seen.add(program, block, "way", (4, 20))
    for lengths in ((4, 9), (2, 20), (3, 12), (2, 9), (4, 20)):
        assert seen.cover(program, block, "way", lengths)
    for lengths in ((1, 9), (5, 9), (4, 8), (4, 21), (4, 9, 1)):
        assert not seen.cover(program, block, "way", lengths)
    assert not seen.cover(another, block, "way", (4, 9))
    assert not seen.cover(program, block, "another", (4, 9))
    assert not seen.cover(program, Block("another"), "way", (4, 9))


def test_a_batch_with_more_tokens_than_any_is_not_covered_though_each_length_was_seen():
    seen, block, program = SeenLengths(), Block("block"), SymbolicType(SimpleNamespace(examples=1), None)
    for lengths in ((2, 100), (8, 25), (4, 50), (2, 25)):
        seen.add(program, block, "way", lengths)
    assert seen.cover(program, block, "way", (3, 50)) and seen.cover(program, block, "way", (2, 80))
    assert not seen.cover(program, block, "way", (8, 100)) and not seen.cover(program, block, "way", (5, 50))


def test_ever_new_batches_of_as_many_tokens_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(seen_programs, "_MOST_ENDS", 3)
    seen, block, program = SeenLengths(), Block("block"), SymbolicType(SimpleNamespace(examples=1), None)
    for batch in range(1, 9):
        seen.add(program, block, "way", (batch, 100 - batch))
        assert seen.cover(program, block, "way", (batch, 100 - batch))
    assert not seen.cover(program, block, "way", (1, 99))


def test_what_was_seen_counts_until_the_program_has_another_example():
    seen, block, examples = SeenLengths(), Block("block"), SimpleNamespace(examples=2)
    program = SymbolicType(examples, None)
    seen.add(program, block, "way", (4,))
    examples.examples = 3
    assert not seen.cover(program, block, "way", (4,))
    seen.add(program, block, "way", (6,))
    assert seen.cover(program, block, "way", (6,)) and not seen.cover(program, block, "way", (5,))


def test_calls_with_more_lengths_are_seen_by_themselves():
    """Inputs that share a storage have a distance too."""
    seen, block, program = SeenLengths(), Block("block"), SymbolicType(SimpleNamespace(examples=1), None)
    seen.add(program, block, "way", (4,))
    assert not seen.cover(program, block, "way", (4, 64))
    seen.add(program, block, "way", (4, 64))
    assert seen.cover(program, block, "way", (4, 64))


def test_a_program_that_is_not_known_is_not_covered():
    seen, block = SeenLengths(), Block("block")
    seen.add(None, block, "way", (4,))
    assert not seen.cover(None, block, "way", (4,))


def test_a_block_that_runs_a_program_in_ever_new_ways_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(seen_programs, "_MOST_CONTEXTS", 3)
    seen, block, program = SeenLengths(), Block("block"), SymbolicType(SimpleNamespace(examples=1), None)
    for way in "abcd":
        seen.add(program, block, way, (4,))
        assert seen.cover(program, block, way, (4,))
    assert not any(seen.cover(program, block, way, (4,)) for way in "abc")


def test_neither_programs_nor_blocks_are_kept_alive(uncollected):
    seen, block, program = SeenLengths(), Block("block"), SymbolicType(SimpleNamespace(examples=1), None)
    other = Block("another")
    seen.add(program, block, "way", (4,))
    seen.add(program, other, "way", (4,))
    del other
    assert len(seen._seen[program]) == 1
    del program
    assert not seen._seen


@pytest.mark.parametrize("most", [3, 4096])
def test_a_run_of_ever_new_sizes_does_not_fill_the_memory(monkeypatch, most):
    monkeypatch.setattr(seen_programs, "_MOST", most)
    training, counts = Training(memory_budget=0.4, rectifier={"enabled": False}), []
    seen = training.runtime._planned._seen
    for time in (20, 12, 16, 14, 15, 17, 18):
        training.compare(time)
        counts.append(len(seen._seen))
    assert max(counts) == (3 if most == 3 else 7)
