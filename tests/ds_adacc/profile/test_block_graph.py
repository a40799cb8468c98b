"""The bytes that the planner expects at each backward step are those that backward takes."""

import pytest
import torch
from recorded import captured, record, under
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.gradient_memory import GradientMemory
from ds_adacc.profile.measure import measure
from ds_adacc.profile.memory_trace import MemoryTrace

SIZE = 1 << 14
OF_A_VALUE = 4 * SIZE * 4  # bytes
CPU = torch.device("cpu")


def one_residual(x):
    return x + x.sin().exp()


def two_residuals(x):
    y = x + x.sin().exp()
    return y + y.cos().exp()


def chain_of_sums(x):
    return x + (x.sin() + (x.cos() + x.exp().sin()))


def difference(x):
    return x.exp() - x.sin().exp()


def scaled(x):
    return torch.add(x.exp(), x.sin().exp(), alpha=2)


def value_plus_itself(x):
    y = x.sin()
    return y + y


def value_with_three_readers(x):
    y = x.sin()
    return y.exp() + y.cos() + y


def broadcast(x):
    return x.sin() + x[:1].exp()


def in_place(x):
    y = x.sin()
    y += x.cos()
    return y.exp()


def rotated(x):
    """What is between a projection and its rotation is needed for nothing else, as in LLaMA's attention."""
    q = x.sin()
    return (q * 2.0 + torch.cat((-q[:, SIZE // 2 :], q[:, : SIZE // 2]), -1) * 3.0).exp().sin()


def rotated_twice(x):
    return rotated(x) * rotated(x.cos())


def written_to(x):
    """What is between x and the values that backward asks for is written to in place, and then freed."""
    wide = torch.cat([x] * 8)
    wide *= 2.0
    return (((wide + 1.0) * 0.5)[:4] + 1).exp().sin()


def saved_by_the_operator_before(x):
    """The sigmoid saves its result, which the difference after it does not ask for."""
    wave = x.cos()
    with torch.no_grad():
        mask = ((torch.cat([x] * 8) * 2.0 + 1.0) * 0.5)[:4] + 1.0
    return (mask + x * 1.0).sigmoid() - wave


def turned(x):
    """Complex numbers get gradients, too."""
    numbers = torch.view_as_complex(x.sin().unflatten(-1, (-1, 2))) * (0.6 + 0.8j)
    return torch.view_as_real(numbers.exp()).flatten(-2).sin()


def estimated(x):
    """What runs without gradients gets none."""
    y = x.sin()
    with torch.no_grad():
        level = (torch.cat([y] * 8).abs() + 1.0).sqrt().mean(0)
    return y.exp() * level


def detached(x):
    y = x.sin()
    level = (torch.cat([y.detach()] * 8).abs() + 1.0).sqrt().mean(0)
    return y.exp() * level


def watched(x):
    """A look at a value, without gradients, does not keep the value's gradient longer."""
    y = x.sin()
    wide = torch.cat([y.exp()] * 4).exp().cos()
    with torch.no_grad():
        level = y.abs().mean()
    return wide[:4] * level


def written_as_data(x):
    """A write past autograd leaves the gradients of what it writes to."""
    y = x.sin()
    y.data.clamp_(-0.5, 0.5)
    return (y.exp() + 1.0).sin().exp()


def written_as_data_once_read(x):
    y = x.sin()
    wave = y + x
    y.detach().mul_(2.0)
    return (y.exp() + 1.0).sin().exp() * wave


def gated(x):
    """As in the feed-forward layer of Phi-3 and GLM: gate and content are one projection."""
    gate, content = torch.cat([x.sin()] * 4, -1).chunk(2, -1)
    return (gate.sigmoid() * content).unflatten(-1, (2, -1)).sum(1)


def turned_parts(x):
    """As in GPT-NeoX: query and key are turned, the value is not."""
    query, key, value = torch.cat([x.sin()] * 3, -1).split(SIZE, -1)
    return (query.exp() * key.cos()).sin() * value


def unbound(x):
    """As in timm's vision transformers: q, k and v come in other memory order than they lie in."""
    query, key, value = torch.cat([x.sin()] * 3, -1).view(2, 2, 3, -1).permute(2, 0, 1, 3).unbind(0)
    return ((query.exp() * key.cos()).sin() * value).view(4, -1)


def of_unequal_parts(x):
    wide, _, narrow = torch.cat([x.sin()] * 3, -1).split([2 * SIZE, SIZE // 2, SIZE // 2], -1)
    return wide.exp().sin()[:, :SIZE] * torch.cat([narrow.cos()] * 2, -1)


def with_parts_that_are_read_twice(x):
    left, right = torch.cat([x.sin()] * 2, -1).chunk(2, -1)
    return (left.exp() * right).sin() + left.cos() * right.sigmoid()


def with_the_whole_beside(x):
    both = torch.cat([x.sin()] * 2, -1)
    left, right = both.chunk(2, -1)
    return (left.exp() * right.cos()).sin() * both.sin()[:, :SIZE]


def with_a_sum_that_reads_a_part_first(x):
    left, right = torch.cat([x.sin()] * 2, -1).chunk(2, -1)
    return (left + 1.0).exp() * right.cos()


def with_slices_of_parts(x):
    left, right = torch.cat([x.sin()] * 2, -1).chunk(2, -1)
    return (left[:, : SIZE // 2].exp() * left[:, SIZE // 2 :].cos()).repeat(1, 2) * right.sin()


def with_expanded_parts(x):
    """As in multi-query attention: all heads of the query have one key and one value."""
    all_of_them = torch.cat([x.sin(), x[:, : SIZE // 2]], -1).view(4, 64, -1)
    query, key, value = all_of_them.split([SIZE // 64, SIZE // 256, SIZE // 256], -1)
    query = query.unflatten(-1, (4, -1)).transpose(1, 2)
    key, value = (part.unsqueeze(1).expand_as(query) for part in (key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(1)


def with_a_part_that_is_returned(x):
    """As in a coupling layer: its gradient arrives with that of the block."""
    left, right = torch.cat([x.sin()] * 4, -1).chunk(2, -1)
    return left.exp().sin(), right


def split_twice(x):
    both = torch.cat([x.sin()] * 2, -1)
    left, right = both.chunk(2, -1)
    again, _ = both.chunk(2, -1)
    return left.exp() * right.cos() * again.sin()


def split_and_sliced(x):
    both = torch.cat([x.sin()] * 2, -1)
    left, right = both.chunk(2, -1)
    return left.exp() * both[:, :SIZE].cos() * right.sin()


def with_a_slice_beside_the_whole(x):
    both = torch.cat([x.sin()] * 2, -1)
    return (both * both[:, :1]).exp()[:, :SIZE].sin() * x


def sliced(x):
    """The gradient of each slice is put into one of the whole."""
    both = torch.cat([x.sin()] * 2, -1)
    return both[:, :SIZE].sigmoid() * both[:, SIZE:]


def joined(x):
    """All of a gradient is there until the last of the values that were joined has been reached."""
    y = x.sin()
    return torch.cat([y.exp().sin(), y.cos().exp()], -1)


def stacked(x):
    y = x.sin()
    return torch.stack([y.exp().sin(), y.cos().exp()], 1).flatten(1)


def in_chunks(x):
    return torch.cat([chunk.exp().sin() for chunk in x.split(1)])


def returned_and_read(x):
    """The gradient of what is returned arrives first of all."""
    y = x.sin()
    return y.tanh(), y


def part_returned_and_read(x):
    left, right = torch.cat([x.sin()] * 2, -1).chunk(2, -1)
    return left.exp() * right.cos(), right


def sliced_first(x):
    """The gradient of a slice waits until backward comes to where the slice was made."""
    y = x.sin()
    half = y[:, : SIZE // 2]
    z = y.exp().cos()
    return z * torch.cat([half.tanh()] * 2, -1)


def with_a_value_twice(x):
    y = x.sin()
    return y * y


def scaled_before_a_join(x):
    y = x.sin()
    return torch.cat([torch.add(y.exp(), y.cos(), alpha=2), x.tanh()], -1)


def view_written_to(x):
    y = x * 1.5
    y[:, : SIZE // 2].neg_()
    return y.exp()


def view_added_to(x):
    y = x.sin().mul(2.0)
    y.view(-1).add_(x.cos().view(-1))
    return y.exp()


def activated_before_a_join(x):
    """As in U-Nets and DenseNets: a part of the gradient arrives, which the step of GELU copies."""
    return torch.cat([x.sin(), nn.functional.gelu(x.cos())], -1)


def turned_after_a_softmax(x):
    return x.view(64, -1).softmax(-1).t().exp().reshape(4, -1)


def sums_alone(x):
    """Nothing is saved, and no step but that of a difference makes a gradient."""
    return torch.cat([x - x[:, :1], x], -1)


def with_a_discarded_branch(x):
    x.exp().sin().sum()
    return x.cos().sigmoid()


BLOCKS = [
    one_residual,
    two_residuals,
    chain_of_sums,
    difference,
    scaled,
    value_plus_itself,
    value_with_three_readers,
    broadcast,
    in_place,
    rotated,
    rotated_twice,
    turned,
    estimated,
    detached,
    watched,
    written_as_data,
    written_as_data_once_read,
    joined,
    stacked,
    in_chunks,
    returned_and_read,
    sliced_first,
    scaled_before_a_join,
    view_written_to,
    view_added_to,
    turned_after_a_softmax,
    sums_alone,
    with_a_discarded_branch,
    gated,
    turned_parts,
    unbound,
    with_parts_that_are_read_twice,
    with_the_whole_beside,
    with_a_sum_that_reads_a_part_first,
    with_slices_of_parts,
    with_expanded_parts,
    with_a_part_that_is_returned,
    part_returned_and_read,
    with_a_slice_beside_the_whole,
    split_twice,
    split_and_sliced,
]
LOOSE = [of_unequal_parts, with_a_value_twice, sliced, activated_before_a_join]


def loss_of(made, weight):
    """The loss of what a block has made, with gradients that nobody keeps."""
    each = made if isinstance(made, tuple) else (made,)
    return sum((tensor * weight[:, : tensor.shape[-1]]).sum() for tensor in each)


def expected_and_taken(block, policy_of):
    """The bytes above those held that one backward should take at its peak under a policy, and those that it takes."""
    leaf = torch.randn(4, SIZE, requires_grad=True)
    found = captured(block, leaf * 1.0)
    profile = measure(found.recording, found, CodecMaker(load({"adacc": {"codecs": "none"}})))
    policy = policy_of(profile)
    expected = planner.simulate(profile, policy)
    run, _ = under(block, found.recording, policy)
    weight = torch.randn(4, 2 * SIZE)
    with MemoryTrace(CPU) as trace:
        x = leaf * 1.0
        loss = loss_of(run(x), weight)
        began = trace.mark()
        (gradient,) = torch.autograd.grad(loss, x)
        ended = trace.mark()
    assert gradient.shape == leaf.shape
    of_loss = 4
    return max(expected.timeline) - expected.held, trace.growth(began, ended) - of_loss


@pytest.mark.parametrize("block", BLOCKS)
def test_backward_takes_what_is_expected(block):
    expected, taken = expected_and_taken(block, planner.retain_policy)
    assert taken == expected


@pytest.mark.parametrize("block", LOOSE)
def test_backward_takes_little_less_than_is_expected(block):
    """What a later replay could need counts as long as that could come, though nothing is replayed."""
    expected, taken = expected_and_taken(block, planner.retain_policy)
    assert taken <= expected <= taken + OF_A_VALUE


@pytest.mark.parametrize("block", [*BLOCKS, *LOOSE, written_to, saved_by_the_operator_before])
def test_replays_take_what_is_expected(block):
    expected, taken = expected_and_taken(block, planner.recompute_policy)
    assert taken <= expected <= taken + OF_A_VALUE


class Saving(torch.autograd.Function):
    """Saves what it makes on its way, which has no gradient."""

    @staticmethod
    def forward(ctx, x):
        inner = x.exp()
        ctx.save_for_backward(inner)
        return inner.sin()

    @staticmethod
    def backward(ctx, grad):
        (inner,) = ctx.saved_tensors
        return grad * inner.cos() * inner


class SavingBlock(nn.Module):
    def forward(self, x):
        return Saving.apply(x)


class Local(nn.Module):
    """Each call makes a Function of its own, so its operators are recorded one by one."""

    def forward(self, x):
        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                self.times = 1
                return x.exp() * 2.0

            @staticmethod
            def backward(ctx, grad):
                return grad

        return Doubled.apply(x)


def test_operators_within_the_forward_of_a_function_may_hand_on_gradients():
    recording = record(Local(), (torch.randn(4, 8, requires_grad=True),), {})
    assert [op.short_name for op in recording.ops] == ["exp", "mul"]
    assert not any(op.detached for op in recording.ops)


def test_no_gradient_passes_through_a_function_without_gradients():
    def block(x):
        with torch.no_grad():
            level = Saving.apply(x)
        return x.exp() * level

    recording = record(block, (torch.randn(4, 8, requires_grad=True),), {})
    assert [(op.short_name, op.detached) for op in recording.ops] == [("Saving", True), ("exp", False), ("mul", False)]
    assert recording.with_gradient == {0, *recording.ops[1].outputs, *recording.ops[2].outputs}


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


def test_a_function_that_writes_without_gradients_leaves_those_of_the_tensor():
    def block(x):
        y = x.sin()
        Doubling.apply(y.detach())
        return y.exp()

    recording = record(block, (torch.randn(4, 8, requires_grad=True),), {})
    assert [op.short_name for op in recording.ops] == ["sin", "Doubling", "exp"]
    assert recording.with_gradient == {value.index for value in recording.values}


def test_a_write_without_gradients_leaves_those_of_the_tensor():
    def clamped(x):
        y = x.sin()
        with torch.no_grad():
            y.clamp_(-0.5, 0.5)
        return y.exp()

    recording = record(clamped, (torch.randn(4, 8, requires_grad=True),), {})
    assert recording.with_gradient == {value.index for value in recording.values}


def test_what_has_a_gradient_was_made_by_an_operator_that_passes_it_on():
    """As operators in the forward of a Function in C++ do, though gradients are off there as under torch.no_grad."""

    def block(x):
        y = x.sin()
        y.data = y.data * 2.0
        return y.exp() + 1.0

    recording = record(block, (torch.randn(4, 8, requires_grad=True),), {})
    assert [op.short_name for op in recording.ops] == ["sin", "mul", "exp", "add"]
    assert recording.with_gradient == {value.index for value in recording.values}


def test_two_values_that_one_operator_writes_to_have_two_gradients():
    def block(x):
        y, z = x.sin(), x.cos()
        torch._foreach_mul_([y.data, z.data], 2.0)
        return y.exp() * z.sin()

    x = torch.randn(4, 8, requires_grad=True)
    recording = record(block, (x,), {})
    assert [op.short_name for op in recording.ops[:3]] == ["sin", "cos", "_foreach_mul_"]
    assert GradientMemory(recording.backward).steps([1])[1].during == 3 * x.nbytes  # those of y, z and x


def test_gradients_pass_through_an_operator_whose_arguments_are_not_recorded():
    def block(x):
        sent = torch.ops._c10d_functional_autograd.all_to_all_single(x.sin(), [4], [4], group)
        return torch.ops._c10d_functional.wait_tensor(sent).exp().sin()

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD.group_name
        recording = record(block, (torch.randn(4, 8, requires_grad=True),), {})
    finally:
        torch.distributed.destroy_process_group()
    assert [op.short_name for op in recording.ops] == ["sin", "all_to_all_single", "exp", "sin"]
    assert recording.with_gradient == {value.index for value in recording.values}


def compiled():
    return torch.compile(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), backend="aot_eager")


@pytest.mark.parametrize("make", [SavingBlock, compiled])
def test_what_a_function_saves_has_no_gradient(make):
    x = torch.randn(4, 8, requires_grad=True)
    recording = record(make(), (x,), {})
    (op,) = recording.ops
    returned, *saved = (index for index in op.outputs if index is not None)
    assert saved and recording.with_gradient == {0, returned}
    assert recording.backward.bytes_of_outputs == x.nbytes


@pytest.mark.parametrize("operator", [torch.add, torch.sub])
def test_a_number_that_scales_a_term_changes_no_steps(operator):
    """Blocks with other numbers are of one type, of which the profiles at several lengths are put together."""

    def steps(alpha):
        args = (torch.randn(4, 8, requires_grad=True),)
        recording = record(lambda x: operator(x.sin(), x.cos() * 2, alpha=alpha).exp(), args, {})
        return recording.digest, [event.name for event in block_graph(recording).events]

    assert steps(1.0) == steps(0.5) == steps(2.0)
