"""What is told of a call of an `autograd.Function`: what `apply` was given, what forward returned, and its context."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from functions import Block, Plain, batch, check
from opaque import array
from recorded import record
from torch.autograd import Function

from ds_adacc.python_watch.watch import Watch


class Identity(Function):
    """Returns what it is given: `apply` then returns another tensor than forward."""

    @staticmethod
    def forward(ctx, x, scale=2.0, shift=0.0):
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Captured(Identity):
    """An argument lies in a cell, as an inner function reads it."""

    @staticmethod
    def forward(ctx, x, scale=2.0):
        ctx.scale = scale
        return (lambda: x)()


class Wrapped(Identity):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, scale=2.0):
        ctx.scale = scale
        return x


class WithSetUp(Identity):
    @staticmethod
    def forward(x, scale=2.0):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Recursive(WithSetUp):
    """Applies itself."""

    @staticmethod
    def forward(x, scale=2.0):
        return Recursive.apply(x, scale - 1) if scale > 0 else x


class Raises(Identity):
    @staticmethod
    def forward(ctx, x, scale=2.0):
        Identity.apply(x)
        raise ValueError("no")


class Hidden(Identity):
    forward = staticmethod(functools.partial(Identity.forward))


class Told:
    """Listens; `declined` are the classes whose end it does not want to know."""

    def __init__(self, *declined):
        self.declined, self.lines = declined, []

    def note_read(self):
        raise AssertionError("nothing is read")

    note_collective = note_hook = note_read

    def note_places(self, places):
        pass

    def function_begins(self, cls, args):
        self.lines.append((cls, args))
        return cls not in self.declined

    def function_ends(self, result, context, raised):
        self.lines.append((result, getattr(context, "scale", None), raised))

    def function_is_hidden(self, cls):
        self.lines.append((cls, "hidden"))


X = torch.arange(3.0, requires_grad=True)
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
BEFORE_C = TORCH < (2, 14)
BY_NAME = pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11's apply takes no keyword arguments")


def told(call, *declined):
    listener = Told(*declined)
    watch = Watch(listener)
    watch.start()
    try:
        call()
    finally:
        watch.stop()
    return listener.lines


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        (lambda: Identity.apply(X), [(Identity, (X,)), (X, 2.0, False)]),
        (lambda: Identity.apply(X, 3.0), [(Identity, (X, 3.0)), (X, 3.0, False)]),
        (lambda: Identity.apply(*(X, 3.0, 1.0)), [(Identity, (X, 3.0, 1.0)), (X, 3.0, False)]),
        pytest.param(lambda: Identity.apply(X, scale=3.0), [(Identity, (X, 3.0)), (X, 3.0, False)], marks=BY_NAME),
        (lambda: Captured.apply(X, 3.0), [(Captured, (X, 3.0)), (X, 3.0, False)]),
        (lambda: Wrapped.apply(X), [(Wrapped, (X,)), (X, 2.0, False)]),
        (lambda: Wrapped.apply(X, 3.0), [(Wrapped, (X, 3.0)), (X, 3.0, False)]),
        (lambda: WithSetUp.apply(X), [(WithSetUp, (X, 2.0)), (X, 2.0, False)]),
        pytest.param(lambda: WithSetUp.apply(scale=3.0, x=X), [(WithSetUp, (X, 3.0)), (X, 3.0, False)], marks=BY_NAME),
        (lambda: Identity.backward(None, Identity.apply(X)), [(Identity, (X,)), (X, 2.0, False)]),
    ],
)
def test_a_call_is_told_with_what_apply_was_given(call, lines):
    assert told(call) == lines


def test_a_function_whose_forward_is_no_python_function_is_hidden():
    assert set(told(lambda: Hidden.apply(X))) == {(Hidden, "hidden")}


def test_functions_within_a_function_are_part_of_it():
    begin, (_, scale, raised) = told(lambda: Recursive.apply(X, 2.0))
    assert begin == (Recursive, (X, 2.0)) and (scale, raised) == (2.0, False)


def test_functions_within_one_that_is_declined_are_told():
    (cls, args), *inner = told(lambda: Outer.apply(X), Outer)
    assert (cls, args) == (Outer, (X,))
    assert inner == [(Identity, (X,)), (X, 2.0, False), (WithSetUp, (X, 5.0)), (X, 5.0, False)]


class Outer(Identity):
    @staticmethod
    def forward(ctx, x):
        return Identity.apply(x) + WithSetUp.apply(x, 5.0)


def test_one_that_raises_is_told_and_the_next_one_too():
    def call():
        with contextlib.suppress(ValueError):
            Raises.apply(X)
        with contextlib.suppress(TypeError):
            Identity.apply(X, 1, 2, 3, 4)
        with contextlib.suppress(TypeError):
            WithSetUp.apply(X, wrong=1)
        WithSetUp.apply(X)

    begin, end, *rest = told(call)
    assert begin == (Raises, (X,)) and end == (None, None, True)
    assert rest == [(WithSetUp, (X, 2.0)), (X, 2.0, False)]


class HiddenPlain(Plain):
    forward = staticmethod(functools.partial(Plain.forward))


class Fills(Plain):
    """Writes by address to zeros, which could be made again."""

    @staticmethod
    def forward(ctx, x):
        y = torch.zeros_like(x)
        array(y)[...] = array(x) * 3
        ctx.save_for_backward(y)
        return y * 1


class HiddenFills(Fills):
    forward = staticmethod(functools.partial(Fills.forward))


class HiddenWithSetUp(WithSetUp):
    setup_context = staticmethod(functools.partial(WithSetUp.setup_context))


@pytest.mark.parametrize(
    ("apply", "is_seen"),
    [
        (HiddenFills.apply, False),
        (HiddenWithSetUp.apply, False),
        (functools.partial(Fills.apply), BEFORE_C),
        (lambda x: next(map(Fills.apply, [x])), BEFORE_C),
        (functools.partial(WithSetUp.apply), BEFORE_C),
        (lambda x: functools.partial(Fills.apply)(x), BEFORE_C),
    ],
    ids=["forward", "setup_context", "partial", "map", "partial, setup_context", "inside a function"],
)
def test_a_function_that_cannot_be_followed_is_not_replayed(apply, is_seen):
    block = Block(SimpleNamespace(apply=apply, takes_weight=False))
    if is_seen:
        check(block, batch())
    else:
        with pytest.raises(AssertionError, match=r"is called by C code .* Call it in Python"):
            record(block, (batch(),), {})


def test_a_helper_that_takes_the_context_is_no_hidden_function():
    """`Helped` is given an object, so its operators are recorded one by one."""
    check(Block(SimpleNamespace(apply=lambda x: Helped.apply(x, object()), takes_weight=False)), batch())


@pytest.mark.parametrize("cls", [Identity, WithSetUp])
def test_a_function_that_takes_a_grad_fn_hides_nothing(cls):
    """As those do which torch calls for a module's backward hooks."""
    lines = [(cls, (X, 2.0)), (X, 2.0, False)]
    assert told(lambda: name_of(cls.apply(X, 2.0).grad_fn)) == lines
    assert told(lambda: name_of(cls.apply(X, 2.0).grad_fn), cls) == lines[:1]


def test_a_function_that_takes_contexts_may_take_anything_else():
    def call():
        text_of(Identity.apply(X).grad_fn)
        text_of((X + 1).grad_fn)
        text_of(1)

    assert told(call) == [(Identity, (X,)), (X, 2.0, False)]


def name_of(grad_fn):
    return type(grad_fn).__name__


def text_of(thing):
    return str(thing)


def helper(ctx, x):
    ctx.save_for_backward(x * 2)
    return x * 3


class Helped(Function):
    @staticmethod
    def forward(ctx, x, thing):
        return helper(ctx, x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None
