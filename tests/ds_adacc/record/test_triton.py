"""A user's Triton kernels: launched by an `autograd.Function`, by a block, and as operators of `torch.library`.

On a CUDA device they run compiled, elsewhere in Triton's interpreter.
"""

import functions
import pytest
import torch
from functions import function_of
from recorded import call_of
from torch import nn
from triton_here import DEVICE, HAS_TRITON, interpreter, needs_triton  # noqa: F401

from ds_adacc.record.capture import capture

if HAS_TRITON:
    import triton
    from triton import language as tl
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    def _scale_rows(x_at, y_at, factor, count, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_at + offsets, mask=offsets < count)
        tl.store(y_at + offsets, x * factor, mask=offsets < count)

    _scale, _to_compile = triton.jit(_scale_rows), JITFunction(_scale_rows)


pytestmark = [pytest.mark.gpu, needs_triton]


def _grid(count):
    return (triton.cdiv(count, 16),)


class Launches(functions.Plain):
    """y = 3x by a kernel; saves a tensor that another kernel has made."""

    @staticmethod
    def forward(ctx, x):
        y, hidden = torch.empty_like(x), torch.empty_like(x)
        _scale[_grid(x.numel())](x, y, 3.0, x.numel(), BLOCK=16)
        _scale[_grid(x.numel())](y, hidden, 0.5, x.numel(), BLOCK=16)
        ctx.save_for_backward(hidden)
        return y

    @staticmethod
    def backward(ctx, grad):
        gradient = torch.empty_like(grad)
        _scale[_grid(grad.numel())](grad.contiguous(), gradient, 3.0, grad.numel(), BLOCK=16)
        return gradient + 0 * ctx.saved_tensors[0]


class LaunchesInPlace(Launches):
    """Doubles its argument, and does not say so."""

    @staticmethod
    def forward(ctx, x):
        _scale[_grid(x.numel())](x, x, 2.0, x.numel(), BLOCK=16)
        return Launches.forward(ctx, x)


class Compiles(functions.Plain):
    """Its kernel is compiled while it runs, as every kernel of Triton is when it is first launched."""

    @staticmethod
    def forward(ctx, x):
        pointer = "*fp32"
        signature = {"x_at": pointer, "y_at": pointer, "factor": "fp32", "count": "i32", "BLOCK": "constexpr"}
        source = triton.compiler.ASTSource(_to_compile, signature, constexprs={"BLOCK": 16})
        assert "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
        return functions.Plain.forward(ctx, x)


@pytest.fixture(scope="module")
def operators():
    @torch.library.triton_op("ds_adacc_tests::scaled_by_triton", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(_scale)[_grid(x.numel())](x, y, factor, x.numel(), BLOCK=16)
        return y

    @torch.library.triton_op("ds_adacc_tests::scaled_by_triton_", mutates_args={"x"})
    def scaled_(x: torch.Tensor, factor: float) -> None:
        torch.library.wrap_triton(_scale)[_grid(x.numel())](x, x, factor, x.numel(), BLOCK=16)

    def keep(ctx, inputs, output):
        _, ctx.factor = inputs
        ctx.save_for_backward(output)

    def backward(ctx, grad):
        return scaled(grad.contiguous(), ctx.factor) + 0 * ctx.saved_tensors[0], None

    scaled.register_autograd(backward, setup_context=keep)
    return scaled, scaled_


def check(block):
    return functions.check(block.to(DEVICE), torch.randn(4, 8, device=DEVICE, requires_grad=True), policies=4)


@pytest.mark.parametrize("function", [Launches, LaunchesInPlace])
def test_a_function_around_a_kernel_is_replayed(function):
    op = function_of(check(functions.Block(function)))
    assert op.refusal is None and bool(op.bases) == (function is LaunchesInPlace)


def test_a_kernel_that_a_block_launches_itself_is_no_part_of_a_replay():
    class Launched(nn.Module):
        def forward(self, x):
            y, rows = x.tanh(), torch.ones_like(x)
            _scale[_grid(x.numel())](rows, rows, 3.0, x.numel(), BLOCK=16)
            return y * rows

    refusals = {op.short_name: op.refusal for op in check(Launched()).ops}
    assert refusals["tanh"] is None and refusals["ones_like"].endswith("overwritten in place")


def test_a_kernel_may_be_compiled_while_its_block_is_recorded(monkeypatch, tmp_path):
    """Compiling it names temporary files at random, and changes what Triton knows of the kernel."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block, x = functions.Block(Compiles), functions.batch()
    captured = capture("block", call_of(block, x))
    assert captured.watch.unguarded is None and function_of(captured.recording).refusal is None
    assert any(tmp_path.iterdir())


def test_a_functional_operator_is_replayed_and_a_write_to_what_others_have_read_is_refused(operators):
    scaled, scaled_ = operators

    class Calls(nn.Module):
        def forward(self, x):
            y = scaled(x.tanh(), 3.0)
            z = y.detach().clone()
            w = z + 1
            scaled_(z, 0.5)
            return y * z + w

    refusals = {op.short_name: op.refusal for op in check(Calls()).ops}
    assert refusals["scaled_by_triton"] is None and refusals["scaled_by_triton_"] == "writes in place"


def test_an_operator_that_writes_to_what_nobody_has_read_is_replayed_with_what_made_it(operators):
    scaled, scaled_ = operators

    class Calls(nn.Module):
        def forward(self, x):
            z = x.detach() * 2
            scaled_(z, 0.5)
            return scaled(x.tanh(), 3.0) * z

    refusals = {op.short_name: op.refusal for op in check(Calls()).ops}
    assert refusals["scaled_by_triton"] is refusals["scaled_by_triton_"] is None
