"""The parts of a split value: which arguments belong to one."""

import pytest
import torch
from recorded import record

from ds_adacc.program.arguments import ValueRef

WIDTH = 12


def parts_read(block):
    """By operator that reads a view of the first value, the shape of the part that the view belongs to, or None."""
    recording = record(block, (torch.randn(2, 3, WIDTH, requires_grad=True),), {})
    (whole,) = recording.ops[0].outputs
    found = {}
    for op in recording.ops[1:]:
        for ref in op.references:
            if isinstance(ref, ValueRef) and ref.index == whole:
                found.setdefault(op.short_name, []).append(ref.part and ref.part.size)
    return found


def heads(part):
    return part.unflatten(-1, (2, -1)).transpose(1, 2)


@pytest.mark.parametrize(
    ("split", "shape"),
    [
        (lambda y: y.chunk(2, -1), (2, 3, 6)),
        (lambda y: y.split(6, -1), (2, 3, 6)),
        (lambda y: y.split([6, 6], -1), (2, 3, 6)),
        (lambda y: y.view(2, 3, 2, 6).unbind(2), (2, 3, 6)),
        (lambda y: y.view(2, 3, 2, 6).permute(2, 0, 1, 3), (2, 3, 6)),  # which Python unbinds
        (lambda y: y.unflatten(-1, (6, 2)).movedim(-1, 0).unbind(), (2, 3, 6)),
    ],
)
def test_views_of_parts_belong_to_them(split, shape):
    def block(x):
        left, right = split(x.sin())
        return left.exp() * heads(right).cos().transpose(1, 2).flatten(2) * left[..., :2].tanh().repeat(1, 1, 3)

    assert parts_read(block) == {"exp": [shape], "cos": [shape], "tanh": [shape]}


def test_slices_belong_to_no_part():
    def block(x):
        y = x.sin()
        return y[..., :6].exp() * y[..., 6:].cos()

    assert parts_read(block) == {"exp": [None], "cos": [None]}


def test_a_slice_across_two_parts_belongs_to_neither():
    def block(x):
        y = x.sin()
        left, right = y.chunk(2, -1)
        return left.exp() * right.cos() * y[..., 3:9].tanh() * y.sigmoid()[..., :6]

    assert parts_read(block) == {"exp": [(2, 3, 6)], "cos": [(2, 3, 6)], "tanh": [None], "sigmoid": [None]}


def test_of_a_value_that_is_split_again_later_arguments_count_as_slices():
    def block(x):
        y = x.sin()
        left, _ = y.chunk(2, -1)
        made = left.exp()
        again, _ = y.chunk(2, -1)
        return made * again.cos()

    assert parts_read(block) == {"exp": [(2, 3, 6)], "cos": [None]}


def test_of_a_value_that_is_sliced_too_later_arguments_count_as_slices():
    def block(x):
        y = x.sin()
        left, right = y.chunk(2, -1)
        made = left.exp()
        same = y[..., :6]
        return made * same.cos() * right.tanh()

    assert parts_read(block) == {"exp": [(2, 3, 6)], "cos": [None], "tanh": [None]}


def test_of_a_value_that_was_sliced_before_it_is_split_arguments_count_as_slices():
    def block(x):
        y = x.sin()
        same = y[..., :6]
        left, right = y.chunk(2, -1)
        return same.cos() * left.exp() * right.tanh()

    assert parts_read(block) == {"cos": [None], "exp": [None], "tanh": [None]}


def test_a_slice_of_a_slice_belongs_to_no_part():
    def block(x):
        y = x.sin()
        left, right = y.chunk(2, -1)
        made = left.exp() * right.tanh()
        return made * y[:, :2][..., :6].cos().repeat(1, 2, 1)[:, :3]

    assert parts_read(block) == {"exp": [(2, 3, 6)], "tanh": [(2, 3, 6)], "cos": [None]}


def test_blocks_that_split_and_that_slice_are_of_two_types():
    """Their memory differs in backward alone, but it does."""

    def splitting(x):
        left, right = x.sin().chunk(2, -1)
        return left.exp() * right

    def slicing(x):
        y = x.sin()
        left, right = y[..., :6], y[..., 6:]
        return left.exp() * right

    one, other = (record(block, (torch.randn(2, 3, WIDTH, requires_grad=True),), {}) for block in (splitting, slicing))
    assert [op.short_name for op in one.ops] == [op.short_name for op in other.ops]
    assert one.digest != other.digest
