"""Follow the calls of `autograd.Function.apply` by what `sys.setprofile` tells.

`apply` is a method in C (since torch 2.14; before that, a Python method that calls one). Of a call in C, Python tells
the class, but neither what it was given nor what it returns. Both are seen at the Function's `forward`, which it runs.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code
from torch.autograd.function import BackwardCFunction

from ds_adacc.python_watch.listener import Listener


@dataclass(eq=False)
class _Call:
    """A call of `cls.apply` by `caller`. `forward`, `context` and `result`: once they are known."""

    cls: type[torch.autograd.Function]
    caller: types.FrameType
    forward: types.FrameType | None = None
    context: Any = None
    result: Any = None


class FunctionWatch:
    """Tells `listener` of each call of a Function that is not part of another one.

    From torch 2.14 on, nothing tells of a call from C code, as `map` or `functools.partial` make it, before its context
    is seen. Such a Function is hidden. So is one whose forward or setup_context is no Python function.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._calls: list[_Call] = []  # that run, each within the one before it; only the last may be followed
        self._is_following = False
        self._awaited: types.CodeType | None = None  # the function of the last one's class that runs next

    @torch._disable_dynamo
    def applied(self, caller: types.FrameType, called: Any) -> None:
        """Something in C that is named "apply" is called: perhaps that of a Function."""
        cls = getattr(called, "__self__", None)
        if self._is_following or not (isinstance(cls, type) and issubclass(cls, torch.autograd.Function)):
            return
        if all(isinstance(each, types.FunctionType) for each in (cls.forward, cls.setup_context)):
            self._calls.append(_Call(cls, caller))
            self._awaited = cls.forward.__code__
        else:
            self._listener.function_is_hidden(cls)

    def called(self, frame: types.FrameType) -> None:
        """A Python function begins."""
        if frame.f_code is self._awaited:
            self._arrived(self._calls[-1], frame)

    @torch._disable_dynamo
    def _arrived(self, call: _Call, frame: types.FrameType) -> None:
        args = arguments(frame)
        if self._is_following:  # setup_context: perhaps that of a call within this one, but the last is its own
            call.context = args[0]
            return
        if not has_setup_context(call.cls):
            call.context, *rest = args
            args = tuple(rest[: len(call.context.needs_input_grad)])  # without defaults, which `apply` was not given
        self._is_following = self._listener.function_begins(call.cls, args)
        call.forward, self._awaited = frame, call.cls.setup_context.__code__ if self._is_following else None

    @torch._disable_dynamo
    def context_is_seen(self, context: Any) -> None:
        """A Python function has begun whose first argument is this, and was a Function's context in an earlier call."""
        if not isinstance(context, BackwardCFunction):
            return
        # After `apply` the context is the `grad_fn` of what it has returned, which any function may take: those that
        # a module's backward hooks call do. Only then does it know its outputs.
        kind: Any = type(context)
        cls = kind._forward_cls
        if not _knows_outputs(context) and not self._is_following and all(call.cls is not cls for call in self._calls):
            self._listener.function_is_hidden(cls)

    def ended(self, frame: types.FrameType, event: str, returned: Any) -> None:
        """A function has returned or raised: `frame`, or one in C that `frame` has called."""
        call = self._calls[-1] if self._calls else None
        if call is None:
            return
        if frame is call.forward and event == "return":
            call.result = returned
        elif frame is call.caller and event != "return":
            was_following, self._is_following, self._awaited = self._is_following, False, None
            self._calls.pop()
            if was_following:
                self._listener.function_ends(call.result, call.context, event == "c_exception")


def _knows_outputs(context: Any) -> bool:
    try:
        return bool(context._input_metadata)
    except RuntimeError:  # torch 2.11 says that once the outputs are gone
        return True


def has_setup_context(cls: type[torch.autograd.Function]) -> bool:
    """Whether the Function sets up its context apart from forward, which then does not take the context."""
    return cls.setup_context is not torch.autograd.Function.setup_context


def arguments(frame: types.FrameType) -> tuple[Any, ...]:
    """What the function was called with, which has just begun. Torch hands on all arguments by position.

    A generator that goes on begins again, too, and may have deleted some.
    """
    names, rest, _, values = inspect.getargvalues(frame)
    return (*(values[name] for name in names if name in values), *(values.get(rest, ()) if rest else ()))


for _each in (FunctionWatch.called, FunctionWatch.ended):  # Python calls them while Dynamo traces: see `Watch`
    skip_code(_each.__code__)
