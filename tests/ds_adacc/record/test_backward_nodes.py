"""The nodes of autograd's graph that are recorded, and the operators that they are of."""

import pytest
import torch
from recorded import captured, record
from torch import nn

from ds_adacc.program.backward_graph import BackwardGraph

WIDTH = 12


def tensor():
    return torch.randn(2, 3, WIDTH, requires_grad=True)


def graph_of(block, *args):
    return captured(block, *(args or (tensor(),))).recording.backward


def made(graph):
    """Of each node that the block has made: its kind, its operator, how many operators had run, whom it gives to."""
    kinds = [node.kind for node in graph.nodes]
    return [
        (node.kind, node.op, node.ops_done, [edge and (kinds[edge.node], edge.place) for edge in node.gives])
        for node in graph.nodes
        if node.gives
    ]


def ends(graph):
    return [(graph.nodes[end.node].kind, end.place) for end in graph.ends]


def passing_on(graph):
    """The kinds of the nodes that give what they get."""
    return {node.kind for node in graph.nodes for edge in node.gives if edge and graph.passes_on(node, edge)}


def filling_up(graph):
    return {node.kind for node in graph.nodes if node.makes_zeros}


def test_each_node_is_of_its_operator_or_of_a_view():
    def block(x):
        left, right = x.sin().chunk(2, -1)
        return left.exp() * right.transpose(1, 2).transpose(1, 2)

    graph = graph_of(block)
    assert made(graph) == [
        ("SinBackward0", 0, 0, [("", 0)]),
        ("SplitBackward0", None, 1, [("SinBackward0", 0)]),
        ("ExpBackward0", 1, 1, [("SplitBackward0", 0)]),
        ("TransposeBackward0", None, 2, [("SplitBackward0", 1)]),
        ("TransposeBackward0", None, 2, [("TransposeBackward0", 0)]),
        ("MulBackward0", 2, 2, [("ExpBackward0", 0), ("TransposeBackward0", 0)]),
    ]
    assert passing_on(graph) == {"TransposeBackward0"}
    assert filling_up(graph) == {"SplitBackward0"}
    assert ends(graph) == [("MulBackward0", 0)]


class Flat(nn.Linear):
    """What `nn.Linear` does to three dimensions. Which view that is at its end depends on torch's version."""

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight.t()).view(2, 3, 5)


def test_what_the_block_has_not_made_is_where_backward_ends():
    graph = graph_of(Flat(WIDTH, 5))
    outside = [node for node in graph.nodes if not node.gives]
    assert [(node.gets[0].size, node.is_parameter) for node in outside] == [
        ((2, 3, WIDTH), False),
        ((5, WIDTH), True),
        ((5,), True),
    ]
    assert made(graph)[-2:] == [
        ("AddmmBackward0", 0, 0, [("", 0), ("ViewBackward0", 0), ("TBackward0", 0)]),
        ("ViewBackward0", None, 1, [("AddmmBackward0", 0)]),
    ]
    assert ends(graph) == [("ViewBackward0", 0)], "what the view is of is alive, but was not returned"


def test_a_write_to_a_view_is_a_node_that_is_made_when_it_has_run():
    def block(x):
        y = x * 2
        y[..., :6].mul_(x[..., 6:])
        return y.exp()

    kinds = [(kind, op) for kind, op, _, _ in made(graph_of(block))]
    assert kinds == [("MulBackward0", 0), ("SliceBackward0", None), ("CopySlices", 2), ("ExpBackward0", 3)]


@pytest.mark.parametrize(
    ("passes", "block"),
    [
        (True, lambda x: x + x.sin()),
        (False, lambda x: x[..., :1] + x[:, :1]),
        (True, lambda x: x.sin().clone()),
        (False, lambda x: x.sin().to(torch.bfloat16)),
        (True, lambda x: torch.cat([x.sin(), x.cos()])),
        (False, lambda x: x.sin().repeat(2, 1, 1)),
    ],
)
def test_nodes_pass_on_what_looks_the_same(passes, block):
    graph = graph_of(block)
    last = graph.nodes[-1]
    assert any(graph.passes_on(last, edge) for edge in last.gives if edge) == passes


def test_of_a_difference_and_of_a_scaled_sum_the_first_term_alone_gets_what_arrives():
    for block in (lambda x: x.sin() - x.cos(), lambda x: torch.add(x.sin(), x.cos(), alpha=2)):
        assert [edge.is_passed_on for edge in graph_of(block).nodes[-1].gives] == [True, False]


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, first, second):
        return first + second


def test_a_function_that_makes_nothing_passes_on_what_it_gets():
    """As ZeRO-3 has them around modules."""
    graph = graph_of(lambda x: Pair.apply(Same.apply(x.exp()))[0])
    assert [(kind, op) for kind, op, _, _ in made(graph)] == [
        ("ExpBackward0", 0),
        ("SameBackward", None),
        ("PairBackward", 1),
    ]
    assert passing_on(graph) == {"SameBackward"}
    assert filling_up(graph) == {"SameBackward", "PairBackward"}


class Squares(torch.autograd.Function):
    """Is recorded operator by operator, since it is given a dict. The first one is a view."""

    @staticmethod
    def forward(ctx, x, options):
        ctx.save_for_backward(x)
        return x.view_as(x).square() * options["scale"]

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient, None


def test_a_function_that_saves_something_makes_its_gradients_of_that():
    graph = graph_of(lambda x: Squares.apply(x.exp(), {"scale": 1.0}))
    assert [(kind, op) for kind, op, _, _ in made(graph)] == [("ExpBackward0", 0), ("SquaresBackward", None)]
    assert passing_on(graph) == set()


class Keeping(nn.Module):
    """Keeps a loss for later, as experts do."""

    def forward(self, x):
        hidden = x.sin()
        self.loss = hidden.mean()
        return hidden.cos()


def test_what_the_block_keeps_is_no_part_of_its_graph():
    """One rank alone may keep it, for its log, and all must agree on the program."""
    graph = graph_of(Keeping())
    assert ends(graph) == [("CosBackward0", 0)]
    assert [kind for kind, *_ in made(graph)] == ["SinBackward0", "CosBackward0"]


def test_what_the_block_discards_is_no_part_of_its_graph():
    def block(x):
        x.exp().sin().sum()
        return x.cos()

    assert [kind for kind, *_ in made(graph_of(block))] == ["CosBackward0"]


def test_a_returned_view_whose_base_was_written_to_gets_none():
    def block(x):
        y = x * 2
        part, _ = y.chunk(2, -1)
        y.mul_(2)
        return y, part

    assert ends(graph_of(block)) == [("MulBackward0", 0)]


def test_a_block_that_hands_back_what_it_was_given_has_no_graph():
    assert graph_of(lambda x: x, tensor() * 2) == BackwardGraph()


def test_without_gradients_there_is_no_graph():
    def block(x):
        with torch.no_grad():
            return x.sin()

    assert graph_of(block) == BackwardGraph()


def test_whoever_made_the_arguments_the_program_is_the_same():
    def block(x, y):
        return x.exp() * y

    leaf, parts = tensor(), torch.randn(2, 2, 3, WIDTH, requires_grad=True).unbind()
    given = [(leaf, leaf.sin()), (parts[1], parts[0]), (leaf * 2, tensor())]
    assert len({record(block, args, {}).digest for args in given}) == 1


def test_blocks_that_split_and_that_slice_are_of_two_types():
    """Their memory differs in backward alone, but it does."""

    def splitting(x):
        left, right = x.sin().chunk(2, -1)
        return left.exp() * right

    def slicing(x):
        y = x.sin()
        left, right = y[..., :6], y[..., 6:]
        return left.exp() * right

    one, other = (record(block, (tensor(),), {}) for block in (splitting, slicing))
    assert [op.short_name for op in one.ops] == [op.short_name for op in other.ops]
    assert one.digest != other.digest


def savers(block):
    recording = record(block, (tensor(),), {})
    return [recording.ops[position.op].short_name for position in recording.positions]


def writing_to_a_view(x):
    y = x * 1.5
    y[..., :6].tanh_()
    return y.cos()


def scaling_a_view(x):
    y = x.exp() * 1.5
    y[..., :6].mul_(2.0)
    return y.cos()


class Local(nn.Module):
    """Each call makes a Function of its own, so its operators are recorded one by one."""

    def forward(self, x):
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                self.times = 1
                ctx.save_for_backward(x)
                return x.exp() * 2.0

            @staticmethod
            def backward(ctx, gradient):
                return gradient * ctx.saved_tensors[0]

        return Scaled.apply(x).sin()


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        made = x.sin()
        ctx.save_for_backward(x, made)
        return made

    @staticmethod
    def backward(ctx, gradient):
        return gradient * sum(ctx.saved_tensors)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (lambda x: torch.nn.functional.silu(x.cos()), ["cos", "silu"]),
        (lambda x: x.cos().sigmoid(), ["cos", "sigmoid"]),
        (lambda x: x.cos().exp().tanh(), ["cos", "exp", "tanh"]),
        (lambda x: x.exp() * x.exp().transpose(1, 2).transpose(1, 2), ["exp", "exp", "mul", "mul"]),
        (lambda x: Saving.apply(x.cos()).sin(), ["cos", "Saving", "Saving", "sin"]),
        (Local(), ["mul", "sin"]),
        (writing_to_a_view, ["tanh_", "cos"]),
        (scaling_a_view, ["exp", "cos"]),
    ],
)
def test_a_tensor_is_saved_by_the_operator_whose_backward_asks_for_it(block, expected):
    assert savers(block) == expected


def strided(block):
    recording = record(block, (tensor(),), {})
    return [recording.ops[index].short_name for index in sorted(recording.backward.strided)]


def test_operators_that_get_a_part_of_a_gradient_or_a_turned_one():
    def block(x):
        sum_of_two = x.exp()
        joined = torch.cat([x.sin(), x.cos(), sum_of_two, sum_of_two], -1)
        turned = (x.tanh() + 1.0).transpose(1, 2)
        return joined.sigmoid(), turned.relu(), x.tan().view(-1), x.sqrt()

    assert strided(block) == ["sin", "cos", "tanh", "add"]


def test_the_node_of_a_view_of_what_another_view_wrote_to_comes_before_its_reader():
    """Autograd makes it as late as while it makes the reader's, and visits it after that."""

    def block(x):
        y = x.sin().view(6, WIDTH)
        y[:, :5] += x.cos().sum((0, 1))[:5]
        return y.exp() * 2.0

    graph = graph_of(block)
    assert [(kind, op) for kind, op, _, _ in made(graph)][-3:] == [
        ("AsStridedBackward0", None),
        ("ExpBackward0", 5),
        ("MulBackward0", 6),
    ]
    assert all(edge is None or edge.node < n for n, node in enumerate(graph.nodes) for edge in node.gives)
