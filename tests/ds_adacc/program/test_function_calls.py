"""What calls of an `autograd.Function` are operators: with which arguments, and of which classes."""

import pytest
import torch
import zoo
from functions import Block, Plain, batch, check, function_of
from recomputing import recomputing
from recorded import record, under
from torch import nn

from ds_adacc.program.arguments import without_data
from ds_adacc.program.recording import _portable
from ds_adacc.python_watch.function_watch import arguments


class Computed(torch.autograd.Function):
    """Takes a function."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 + 0 * ctx.saved_tensors[0], None


def test_objects_among_the_arguments_leave_the_operators_to_be_recorded_one_by_one():
    scale = 3

    class Computes(nn.Module):
        def forward(self, x):
            return Computed.apply(x.tanh(), lambda x: x * scale).tanh()

    recording = check(Computes(), batch())
    assert [op.short_name for op in recording.ops] == ["tanh", "mul", "tanh"]
    assert recording.remarks == ("Computed: it takes a function, so its operators are recorded one by one",)


@pytest.mark.parametrize("given", [torch.tanh, lambda x: x * 3])
def test_a_function_that_holds_nothing_may_be_an_argument(given):
    class Applied(Computed):
        """Another class."""

    class Computes(nn.Module):
        def forward(self, x):
            return Applied.apply(x.tanh(), given).tanh()

    recordings = [check(Computes(), batch(), policies=2) for _ in range(2)]
    assert function_of(recordings[0]).refusal is None
    assert recordings[0].digest == recordings[1].digest
    assert " at 0x" not in repr(without_data(_portable(function_of(recordings[0])), frozenset()))


def test_the_first_call_of_a_custom_operator_changes_no_state():
    @torch.library.custom_op("ds_adacc_tests::never_called_before", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(y := double(x))
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad * 2 + 0 * ctx.saved_tensors[0]

    class Computes(nn.Module):
        def forward(self, x):
            return Doubles.apply(x.tanh()).tanh()

    block = Computes()
    recordings = [record(block, (batch(),), {}) for _ in range(2)]
    assert [function_of(recording).refusal for recording in recordings] == [None, None]


def test_a_class_that_is_made_inside_a_function_and_refers_to_what_is_there():
    def of(scale):
        class Local(Plain):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x * 1)
                return x * scale

        return Local

    recording = check(Block(of(3.0)), batch())
    assert function_of(recording).refusal is None and not recording.remarks

    class Makes(nn.Module):
        """No guard sees the class before it is made."""

        def forward(self, x):
            return of(x.shape[0]).apply(x)

    recording = check(Makes(), batch())
    assert recording.remarks == (
        "Local: its class is made inside a function at each call, and refers to what is there, "
        "so its operators are recorded one by one",
    )


def test_a_class_that_is_made_at_each_call_and_refers_to_nothing_is_one_operator():
    class Makes(nn.Module):
        def forward(self, x):
            class Local(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x * 2

                @staticmethod
                def backward(ctx, gradient):
                    return gradient * 2

            return Local.apply(x)

    recording = check(Makes(), batch())
    assert function_of(recording).refusal is None and not recording.remarks


def test_what_a_local_class_refers_to_may_change():
    """The block is recorded anew; between forward and backward it is an error."""
    scales = [2.0]

    class Local(Plain):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 1)
            return x * scales[0]

    work, block, x = recomputing(), Block(Local), batch()
    for scale in (2.0, 2.0, 3.0):
        scales[0] = scale
        zoo.assert_exact(block, (x,), {}, lambda x: work.checkpoint(block, x))
    assert work.recordings == 2
    run, _ = under(block, record(block, (x,), {}))
    output = run(x)
    scales[0] = 4.0
    with pytest.raises(RuntimeError, match=r"Local cannot be replayed: .*<scales>.contents\[0\]"):
        output.sum().backward()


class Offset(Plain):
    """With an argument that is mostly given by name."""

    @staticmethod
    def forward(ctx, x, offset):
        ctx.save_for_backward(x * offset)
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 + 0 * ctx.saved_tensors[0], None


def test_arguments_by_name():
    class Named(nn.Module):
        def forward(self, x):
            return Offset.apply(x.tanh(), offset=2.0).tanh()

    try:
        Named()(batch())
    except TypeError:
        pytest.skip("this version of torch takes no arguments by name")
    op = function_of(check(Named(), batch()))
    assert op.refusal is None and op.args[1:] == (2.0,)


class Drawn(Plain):
    """Draws its mask inside, from the generator that it is given."""

    @staticmethod
    def forward(ctx, x, generator):
        mask = torch.rand(x.shape, generator=generator) > 0.4
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def test_a_draw_from_a_generator_that_a_function_is_given():
    """It is drawn again, and the generator is left where plain autograd leaves it."""

    class Given(Block):
        def __init__(self):
            super().__init__(Drawn)
            self.generator = torch.Generator()

        def forward(self, x):
            self.generator.manual_seed(7)
            return self.second(Drawn.apply(self.first(x), self.generator).tanh())

    block, x = Given(), batch()
    assert function_of(check(block, x)).refusal is None
    after = block.generator.get_state()
    block(x)
    assert torch.equal(block.generator.get_state(), after)


def test_the_arguments_of_a_generator_that_has_deleted_one():
    def of(first, second, *rest):
        del first, rest
        yield second

    generator = of(1, 2, 3)
    next(generator)
    assert arguments(generator.gi_frame) == (2,)
