"""A block as one operator: what of it is the same in all calls and on all ranks, and which blocks cannot be one."""

from dataclasses import replace

import pytest
import torch
from experts import TOKENS, WIDTH, layers
from recorded import captured
from torch import nn

from ds_adacc.program.refusals import COLLECTIVE, REPLACED, TAINTED, UNSEEN
from ds_adacc.whole_blocks.one_operator import as_whole, calls_collective, why_not_again


def recorded(block, size=TOKENS, seed=0):
    x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    return captured(block, x).recording


def test_one_operator_makes_all_that_the_block_saves():
    recording = recorded(layers()[0])
    whole = as_whole(recording, "(Experts)")
    assert whole.is_whole and not recording.is_whole
    (op,) = whole.ops
    assert (op.short_name, op.reads, op.outputs) == ("(Experts)", (0,), (1,))
    assert [(value.origin, value.nbytes) for value in whole.values] == [("input", TOKENS * WIDTH * 4), ("made", 0)]
    assert whole.saved == {0, 1}
    assert whole.segments.rebuildable == {0}
    assert recording.data_read_at is not None
    assert whole.remarks == (
        f"{recording.data_read_at} reads data into Python, or makes a shape that depends on data. So the block is "
        "recomputed as a whole, by a second forward, or retained as a whole",
    )


def test_what_data_decide_is_no_part_of_its_type():
    block = layers()[0]
    one = recorded(block)
    with torch.no_grad():
        block.gate.bias[0] = -100
    other = recorded(block)
    assert one.digest != other.digest, "an expert gets no token"
    assert as_whole(one, "(Experts)").digest == as_whole(other, "(Experts)").digest


def test_its_sizes_its_class_and_what_comes_before_are():
    class More(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x.sin())

    block = layers()[0]
    digests = {
        as_whole(recorded(block), "(Experts)").digest,
        as_whole(recorded(block, size=TOKENS + 1), "(Experts)").digest,
        as_whole(recorded(block), "(Others)").digest,
        as_whole(recorded(More(block)), "(Experts)").digest,
    }
    assert len(digests) == 4


def test_a_doubt_is_none_for_it():
    whole = as_whole(recorded(layers()[0]), "(Experts)")
    assert whole.doubted("anything") is whole


def test_a_collective_may_be_called_again_if_all_ranks_do():
    recording = recorded(layers()[0])
    read = next(op.index for op in recording.ops if op.refusal == TAINTED)

    def with_collective_at(index):
        ops = [replace(op, refusal=COLLECTIVE) if op.index == index else op for op in recording.ops]
        return replace(recording, ops=tuple(ops))

    assert not calls_collective(recording)
    for index, comes_after in ((0, False), (read + 1, True)):
        found = with_collective_at(index)
        assert why_not_again(found) is None
        assert calls_collective(found) and calls_collective(found, once_data_was_read=True) == comes_after


def test_a_block_whose_second_forward_calls_collectives_is_of_another_type():
    recording = recorded(layers()[0])
    alone, together = (as_whole(recording, "(Experts)", repeats_collectives=each) for each in (False, True))
    assert (alone.repeats_collectives, together.repeats_collectives) == (False, True)
    assert alone.digest != together.digest
    assert together.remarks[0].endswith("A second forward calls collectives, so all ranks run it or none does")


@pytest.mark.parametrize("refusal", [UNSEEN, REPLACED])
def test_operators_with_effects_must_not_run_twice(refusal):
    recording = recorded(layers()[0])
    assert why_not_again(recording) is None
    *others, last = recording.ops
    assert why_not_again(replace(recording, ops=(*others, replace(last, refusal=refusal)))) is not None


def test_compiled_code_must_not_run_twice():
    recording = recorded(layers()[0])
    assert why_not_again(replace(recording, compiled_from=0)) == "it runs compiled code"
