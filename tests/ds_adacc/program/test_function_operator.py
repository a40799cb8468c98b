"""A call of an `autograd.Function` is one operator: replayed bit for bit, or refused with the reason."""

import threading

import numpy as np
import opaque
import pytest
import torch
import zoo
from functions import Block, Plain, batch, check, function_of
from opaque import array
from recorded import record, under
from torch import nn

from ds_adacc import register_function
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.program.known_functions import aten_counterpart
from ds_adacc.program.registration import computes_only

factor = 2.0
counter = [0]
table = torch.full((8,), 2.0)


class Hidden(Plain):
    """Saves what is neither an argument nor an output, and a view of that."""

    @staticmethod
    def forward(ctx, x):
        inner = torch.empty_like(x)
        array(inner)[...] = array(x) * 2
        ctx.save_for_backward(inner, inner[:, 1:], None, x)
        return inner * 1.5

    @staticmethod
    def backward(ctx, grad):
        inner, part, none, x = ctx.saved_tensors
        assert none is None and torch.equal(part, inner[:, 1:]) and torch.equal(inner, 2 * x)
        return grad * 3 * (inner / (2 * x))


class SetUp(torch.autograd.Function):
    """With `setup_context`, a default, an output without gradient and one that is no tensor."""

    takes_weight = False

    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale=3.0):
        y = torch.empty_like(x)
        array(y)[...] = array(x) * np.float32(scale)
        return y, y > 0, "name"

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.scale = inputs
        y, sign, _ = output
        ctx.mark_non_differentiable(sign)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x * 1, y)

    @staticmethod
    def backward(ctx, grad, of_sign, _):
        assert of_sign is None
        x, y = ctx.saved_tensors
        return grad * ctx.scale + 0 * (x + y), None


class Noise(Plain):
    """A dropout that draws its mask inside."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.rand(x.shape) > 0.4
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Needs(Plain):
    """Looks at which gradients are needed, and saves accordingly; runs a graph of its own inside."""

    takes_weight = True

    @staticmethod
    def forward(ctx, x, weight):
        assert not torch.is_grad_enabled()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight * 1 if x.requires_grad else None)
        return x * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class Outer(Plain):
    """Applies another Function inside."""

    @staticmethod
    def forward(ctx, x):
        y = Plain.apply(x) + 1
        ctx.save_for_backward(y)
        return y


class Attribute(Plain):
    """Keeps a tensor out of the hooks' reach."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = [x * 3]
        return ctx.kept[0] * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 + 0 * ctx.kept[0]


class Aliasing(Plain):
    """Points a tensor at its argument's memory, and copies that onto itself, as Triton's interpreter does."""

    @staticmethod
    def forward(ctx, x):
        alias = x.new_empty(0)
        alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
        result = Plain.forward(ctx, alias)
        x.untyped_storage().copy_(alias.untyped_storage())
        return result


class WithState(Plain):
    @staticmethod
    def forward(ctx, x):
        counter[0] += 1
        return Plain.forward(ctx, x)


class ReadsData(Plain):
    @staticmethod
    def forward(ctx, x):
        ctx.positive = bool(x.sum() > 0)
        return Plain.forward(ctx, x)


class ReadsTensor(Plain):
    @staticmethod
    def forward(ctx, x):
        return Plain.forward(ctx, x * table[0])


class InPlace(Plain):
    """Doubles its argument by address, and does not say so."""

    @staticmethod
    def forward(ctx, x):
        array(x)[...] *= 2
        return Plain.forward(ctx, x)


class Dirty(Plain):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x.mul_(3)


class Scaled(Plain):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * factor)
        return x * 3


@pytest.mark.parametrize("function", [Plain, Hidden, SetUp, Noise, Needs, Outer, Aliasing])
def test_a_function_is_replayed(function):
    recording = check(Block(function), batch())
    op = function_of(recording)
    assert op.refusal is None and op.short_name == function.__name__
    saved = [recording.values[index] for index in recording.saved]
    assert all(value.producer in block_graph(recording).rebuildable_ops for value in saved if value.origin == "made")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (WithState, f"it keeps state: {__name__}.counter[0] changes"),
        (ReadsData, "reads data into Python"),
        (ReadsTensor, "it reads a tensor that is not among its arguments"),
    ],
)
def test_a_function_is_refused(function, reason):
    assert function_of(check(Block(function), batch())).refusal == reason


def test_state_is_changed_as_often_as_the_function_is_called():
    counter[0] = 0
    block, x = Block(WithState), batch()
    run, _ = under(block, record(block, (x,), {}))
    run(x).sum().backward()
    assert counter[0] == 2


@pytest.mark.parametrize("function", [InPlace, Dirty])
def test_a_write_to_an_argument_is_replayed_with_what_made_it(function):
    recording = check(Block(function), batch())
    assert function_of(recording).refusal is None and function_of(recording).bases


@pytest.mark.parametrize("function", [InPlace, Dirty])
def test_a_write_to_an_argument_that_others_read_is_refused(function):
    class Both(nn.Module):
        def forward(self, x):
            y = x * 1
            z = y + 1
            return function.apply(y) * z

    assert function_of(check(Both(), batch())).refusal == "it writes to an argument in place"


def test_a_write_to_a_parameter_is_plain_autograd():
    class OfWeight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8))

        def forward(self, x):
            return x * InPlace.apply(self.weight)

    with pytest.raises(AssertionError, match="writes to a parameter in place"):
        record(OfWeight(), (batch(),), {})


def test_bytes_in_attributes_are_told():
    recording = check(Block(Attribute), batch())
    assert recording.remarks == ("Attribute: keeps 128 B in attributes of ctx until backward; no plan frees them",)


def test_a_number_that_changes_between_forward_and_backward_is_an_error(monkeypatch):
    block, x = Block(Scaled), batch()
    recording = check(block, x)
    run, _ = under(block, recording)
    output = run(x)
    monkeypatch.setattr(f"{__name__}.factor", 3.0)
    with pytest.raises(RuntimeError, match=rf"Scaled cannot be replayed: {__name__}\.factor"):
        output.sum().backward()


@pytest.mark.parametrize("name", ["attention", "layer norm", "cross entropy"])
def test_stand_ins_for_known_libraries(name):
    weight, bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
    head = nn.Parameter(torch.randn(16, 8))

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias, self.head = weight, bias, head

        def forward(self, x):
            if name == "attention":
                q, k, v = ((x * n).reshape(1, 4, 2, 4) for n in (1, 2, 3))
                return opaque.Attention.apply(q, k, v, 0.0, 0.5, True, (-1, -1), None, False, True)
            if name == "layer norm":
                return opaque.LayerNorm.apply(x * 2, self.weight, self.bias, (8,), 1e-5)
            return opaque.CrossEntropy.apply(x.tanh(), self.head, torch.arange(4))

    assert function_of(check(Calls(), batch())).refusal is None


def test_autocast_is_as_in_forward():
    class Product(Plain):
        @staticmethod
        def forward(ctx, x, weight):
            y = x @ weight
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad.float(), ctx.saved_tensors[0].float().t() @ grad.float()

    class Casts(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return Product.apply(x.tanh(), x.sin().t()).float()

    recording = check(Casts(), torch.randn(8, 8, requires_grad=True))
    op = function_of(recording)
    assert op.refusal is None and recording.values[op.outputs[0]].geometry.dtype is torch.bfloat16


def test_functions_of_other_threads_are_not_the_blocks():
    class Threaded(nn.Module):
        def forward(self, x):
            y = Plain.apply(x)
            thread = threading.Thread(target=lambda: Hidden.apply(batch()))
            thread.start()
            thread.join()
            return y * 2

    assert function_of(check(Threaded(), batch())).short_name == "Plain"


def test_apply_that_was_looked_up_before():
    applied = Plain.apply

    class Early(nn.Module):
        def forward(self, x):
            return applied(x.tanh())

    assert function_of(check(Early(), batch())).refusal is None


def test_a_function_that_raises_leaves_the_block_as_it_is():
    class Fails(Plain):
        @staticmethod
        def forward(ctx, x):
            x.add_(1)
            raise ValueError("no")

    class Catches(nn.Module):
        def forward(self, x):
            y = x * 2
            try:
                return Fails.apply(y)
            except ValueError:
                return Plain.apply(y)

    check(Catches(), batch())


def test_vmap_inside_a_block():
    class Mapped(nn.Module):
        def forward(self, x):
            return torch.vmap(lambda row: Tripled.apply(row))(x.tanh()) * 2

    check(Mapped(), batch())


class Tripled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 + 0 * ctx.saved_tensors[0]


def test_nothing_is_patched_while_recording():
    class Looks(nn.Module):
        def forward(self, x):
            assert vars(torch.autograd.Function)["apply"] is apply
            return Plain.apply(x)

    apply = vars(torch.autograd.Function)["apply"]
    record(Looks(), (batch(),), {})


def test_roles_follow_the_names_of_known_functions():
    block = opaque.Block()
    recording = record(block, (torch.randn(2, 16, 64, requires_grad=True),), {})
    roles = {value.label: value.role for value in recording.values if value.index in recording.saved}
    assert roles["RMSNorm"] == roles["RMSNorm 2"] == "layernorm"
    assert roles["RMSNorm output 3"] == "statistic"
    assert [roles[name] for name in ("query", "key", "v out")] == ["query", "key", "value"]
    assert roles["Attention"] == "attention" and roles["Attention output 5"] == "statistic"
    assert roles["gate out"] == roles["up out"] == "gelu"


@pytest.mark.parametrize(
    ("name", "operator", "is_run_alone"),
    [
        ("LigerRMSNormFunction", "rms_norm", True),
        ("FusedLayerNormAffineFunction", "rms_norm", True),
        ("LigerSiLUMulFunction", "silu", True),
        ("LigerGELUMulFunction", "gelu", True),
        ("SwiGLUFunction", "silu", True),
        ("ApplyRotaryEmb", "mul", True),
        ("LigerRopeFunction", "mul", True),
        ("FlashAttnVarlenFunc", "scaled_dot_product", True),
        ("FusedAttnFunc", "scaled_dot_product", True),
        ("_LayerNormLinear", "linear", False),
        ("_LayerNormMLP", "linear", False),
        ("LayerNormLinearFn", "linear", False),
        ("LinearWithGradAccumulationAndAsyncCommunication", "linear", False),
        ("LigerFusedLinearCrossEntropyFunction", "linear", False),
        ("MoEPermute", None, False),
    ],
)
def test_known_functions_by_their_names(name, operator, is_run_alone):
    """The backward of a Linear that a parallel one may be holds a collective, whatever it is fused with."""
    cls = type(name, (Plain,), {})
    assert (aten_counterpart(cls), computes_only(cls)) == (operator, is_run_alone)


class FusedAttention(Plain):
    """Where its texts begin stands before q, as in TransformerEngine's; q and the packed k and v go by their names."""

    @staticmethod
    def forward(ctx, edges, q, kv):
        ctx.save_for_backward(q, kv)
        return q + kv

    @staticmethod
    def backward(ctx, grad):
        return None, grad, grad


def test_roles_of_what_attention_reads_follow_the_names_of_its_arguments():
    edges = torch.tensor([0, 4], dtype=torch.int32)
    recording = record(lambda x: FusedAttention.apply(edges, x * 2, x * 3), (batch(),), {})
    roles = [recording.values[index].role for index in function_of(recording).reads]
    assert roles[-2:] == ["query", "key"]
    assert not {"query", "key", "value"} & set(roles[:-2])


class Told(Plain):
    """Registered below."""


class Never(Plain):
    """Registered below."""


assert register_function(Told, roles={"x": "query", "output": "key"}) is Told
register_function(Never, replay="never")


def test_what_is_registered():
    recording = record(Block(Told), (batch(),), {})
    op = function_of(recording)
    assert [recording.values[index].role for index in (*op.reads, op.outputs[0])] == ["query", "key"]
    recording = record(Block(Never), (batch(),), {})
    assert function_of(recording).refusal == "it is registered as never to be replayed"
    assert recording.remarks_on_replays == ("Never: never replayed: it is registered as never to be replayed",)

    class Child(Never):
        """A class by itself."""

    assert function_of(record(Block(Child), (batch(),), {})).refusal is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cls": Block}, "takes a subclass of torch.autograd.Function"),
        ({"cls": Plain, "replay": "always"}, "replay must be one of 'auto', 'never', 'operators'; got 'always'"),
        ({"cls": Plain, "roles": {"x": "q"}}, "'q' is no role"),
        ({"cls": Plain, "roles": {"y": "query"}}, "forward of Plain has no argument 'y'"),
        ({"cls": Plain, "roles": {"output 0": "query"}}, "forward of Plain has no argument 'output 0'"),
    ],
)
def test_registering_what_is_wrong(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        register_function(**wrong)


@pytest.mark.parametrize("rope", [opaque.Rope, opaque.RopeInPlace])
def test_a_block_of_functions_has_the_choices_of_a_plain_one(rope):
    recording = check(opaque.Block(rope=rope), torch.randn(2, 16, 64, requires_grad=True))
    assert not recording.remarks_on_replays
    rebuildable = block_graph(recording).rebuildable_ops
    owned = [recording.values[index] for index in recording.saved if recording.values[index].owned]
    rebuilt = sum(value.nbytes for value in owned if value.producer in rebuildable)
    assert rebuilt >= 0.9 * sum(value.nbytes for value in owned)


class TellsData(Plain):
    """Returns a number that it has read: the block may take another turn."""

    @staticmethod
    def forward(ctx, x):
        return Plain.forward(ctx, x), bool(x.sum() > 0)

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 3


def test_a_number_that_a_function_reads_may_decide_what_follows():
    class Turns(nn.Module):
        def forward(self, x):
            y, is_positive = TellsData.apply(x.tanh())
            return y.sin() if is_positive else y * y

    block, x = Turns(), torch.full((4, 8), 0.5, requires_grad=True)
    recording = check(block, x)
    assert function_of(recording).refusal == "reads data into Python"
    other = torch.full((4, 8), -0.5, requires_grad=True)
    expected = zoo.gradients(block, (other,), {})
    run, _ = under(block, recording)
    zoo.assert_same_bits(expected, zoo.gradients(block, (other,), {}, run))
