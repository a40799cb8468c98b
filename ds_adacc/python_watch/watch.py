"""Watch Python's calls while a block is recorded: what global state they read, and numbers that nothing can guard.

Those are of Python's and NumPy's random generators, of the clock, of a file, of a caller's variables.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import skip_code
from torch.autograd.function import BackwardCFunction

from ds_adacc.python_state.calls_in_c import hands_over_work, reads_data, writes_data
from ds_adacc.python_state.codes import names_in
from ds_adacc.python_state.content import is_pybinds
from ds_adacc.python_state.libraries import TRUSTED, is_library, is_trusted
from ds_adacc.python_state.places import PythonReads
from ds_adacc.python_watch.callers import (
    COMPILED_CODE,
    calls_under_way,
    is_for_user,
    is_import,
    is_of_compiler,
    is_ours,
    is_random_of_no_account,
)
from ds_adacc.python_watch.code_places import RANDOM, CodePlaces, is_put_back, state_of_numpy
from ds_adacc.python_watch.collectives import is_collective
from ds_adacc.python_watch.function_watch import FunctionWatch, arguments
from ds_adacc.python_watch.listener import Listener

# What reads attributes whose names are not in the code.
_BY_NAME = frozenset({"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "asdict", "astuple"})
_BY_NAME |= {"__getstate__", "__reduce__", "__reduce_ex__"}
# The methods in C of tensors and of nodes in the autograd graph. Tensor.register_hook calls the third.
_HOOKS = frozenset({"register_hook", "register_prehook", "_register_hook_dict", "retain_grad"})
# The functions that launch a kernel of Triton's, and the attributes by which other packages reach a tensor's memory.
_LAUNCHES = frozenset({"run", "runner", "__call__"})
_MAKERS = frozenset({"tensor", "as_tensor", "new_tensor"})  # functions of torch that make a tensor of a number
_ADDRESSES = frozenset({"data_ptr", "__cuda_array_interface__"})
_DIFFERENTIATE = torch.autograd.grad.__code__, torch.autograd.backward.__code__
_OUTSIDE = frozenset({"time", "datetime", "uuid", "_uuid", "posix", "nt", "_io", "io", "_socket"})
# Functions in C of `os` that read nothing: they compute with a path, or write.
_READ_NOTHING = frozenset({"fspath", "_path_normpath", "_path_splitroot", "_path_splitroot_ex", "putenv", "unsetenv"})
_READ_NOTHING |= {"mkdir", "remove", "unlink", "rename", "replace"}
_FRAMES = frozenset({"_getframe", "_current_frames"})  # of `sys`: by these, code reads variables of its callers
_READABLE_LIBRARIES = frozenset({"os"})  # os.getenv reads a global of its module, as a function of the user's would


class _Code(NamedTuple):
    """A code object that has been looked at: what it reads, and whether it is that of a collective.

    `reads`: of code of the user's; None: what it reads does not change. `takes_context`: its first argument is the
    `ctx` of a Function. `gives_address`: it gives a tensor's address away. `is_trusted`: it is of torch, of another
    trusted package or of the standard library.
    """

    code: types.CodeType
    reads: CodePlaces | None
    is_collective: bool
    takes_context: bool
    gives_address: bool
    is_trusted: bool


class Watch:
    """Watches from `start` to `stop`, and tells `listener`. Calls of other threads are none of the block's.

    Nor is what Dynamo and its backends do to compile the block, which are millions of calls.

    `reads`: what the functions read besides their arguments. `sources`: those of numbers that cannot be guarded, in
    order; of each, whether it is a random generator that a second forward puts back (Rule E17).

    Python allows one function that is told of calls: `refusal` says so if there is another one.
    """

    def __init__(self, listener: Listener) -> None:
        self.reads = PythonReads()
        self.sources: dict[str, bool] = {}
        self._listener = listener
        self._functions = FunctionWatch(listener)
        self._is_running = False
        self._of_numpy = b""  # the state of NumPy's generator at the start
        self._thread: int | None = None
        self._is_compiling = False
        self._pauses = 0
        self._codes: dict[int, _Code] = {}  # by identity
        self._maker: Any = None  # the function of torch that makes a tensor of a number now
        self._harmless: set[types.BuiltinFunctionType] = set()  # functions in C
        self._importing: types.FrameType | None = None
        self._not_imported: list[tuple[types.CodeType, dict[str, Any]]] = []  # codes, with their globals

    @staticmethod
    def refusal() -> str | None:
        """Why nothing can be watched now."""
        if sys.getprofile() is None:
            return None
        return "a profiler of Python's calls is running, such as cProfile before Python 3.12"

    def start(self) -> None:
        """Raises RuntimeError if it is not possible."""
        reason = self.refusal()
        if reason is not None:
            raise RuntimeError(f"{reason}, and there can be only one")
        self._is_running = True
        self._thread = threading.get_ident()
        self._of_numpy = state_of_numpy()
        callback_handler.register_start_callback(self._compiler_begins)
        callback_handler.register_end_callback(self._compiler_ends)
        sys.setprofile(self._on_event)

    def pause(self) -> None:
        """Watch nothing until as many calls of `resume`. Other threads are not watched anyway."""
        if self._is_running and threading.get_ident() == self._thread:
            self._pauses += 1
            sys.setprofile(None)

    def resume(self) -> None:
        if self._is_running and threading.get_ident() == self._thread:
            self._pauses -= 1
            if not self._pauses:
                sys.setprofile(self._on_event)

    def paused(self) -> _Paused:
        """A context in which nothing is watched."""
        return _Paused(self)

    def stop(self) -> None:
        if self._is_running:
            sys.setprofile(None)
            self._forget_compiler()
            if state_of_numpy() != self._of_numpy and self.unguarded is None:  # Python tells of no call of NumPy's
                self.sources["numpy.random in a library"] = True
        self._is_running = False
        self._importing = None
        del self._listener, self._functions  # which hold this object
        for code, namespace in self._not_imported:
            places = CodePlaces(code)
            places.add_imports(namespace)
            self._note(places)
        self._not_imported.clear()

    def note_held(self, modules: Iterable[types.ModuleType]) -> None:
        """Note what the code that has run names of Python modules of the user's that the block holds, or is given."""
        given = list(modules)
        for known in self._codes.values():
            if known.reads is not None:
                places = CodePlaces(known.code)
                for module in given:
                    places.add_members(module)
                self._note(places)

    def _compiler_begins(self, _: Any) -> None:
        if threading.get_ident() == self._thread:
            self._is_compiling = True
            self.pause()

    def _compiler_ends(self, _: Any) -> None:
        if threading.get_ident() == self._thread and self._is_compiling:
            self._is_compiling = False
            self.resume()

    def _forget_compiler(self) -> None:
        if self._is_compiling:  # torch tells only of the end of the last compilation, in whatever thread
            self.sources["what it has run while another thread compiled"] = False
        if self._compiler_begins in callback_handler.start_callbacks:  # `torch._dynamo.reset` may have removed them
            callback_handler.remove_start_callback(self._compiler_begins)
            callback_handler.remove_end_callback(self._compiler_ends)

    @property
    def unguarded(self) -> str | None:
        """The first source of numbers that cannot be guarded; None if there is none."""
        return next(iter(self.sources), None)

    @property
    def not_put_back(self) -> str | None:
        """The first source that a second forward does not put back; None if there is none."""
        return next((what for what, is_restored in self.sources.items() if not is_restored), None)

    def names(self) -> frozenset[str] | None:
        """All names and texts in the code that has run: it reads attributes of these names. None: it makes names too.

        Code of torch and of the standard library makes names as well, as `vars` does in `argparse.Namespace.__eq__`. So
        no name proves that nothing was read (`GuardHistory.unread`).
        """
        names: set[str] = set()
        for known in self._codes.values():
            found = names_in(known.code)
            if not known.is_trusted and not found.isdisjoint(_BY_NAME):
                return None
            names |= found
        return frozenset(names)

    def has_seen(self, code: types.CodeType) -> bool:
        """Whether a function with this code has run."""
        return id(code) in self._codes

    @property
    def has_seen_backward(self) -> bool:
        """Whether the block has run a backward in its forward."""
        return any(map(self.has_seen, _DIFFERENTIATE))

    @property
    def makes_of_number(self) -> bool:
        """Whether torch makes a tensor of a number now. True if nothing is watched.

        Not if it is given an object whose code runs meanwhile: a `__float__` may read another tensor, of which the
        dispatcher is not told there.
        """
        return self._maker is not None or not self._is_running

    def _on_event(self, frame: types.FrameType, event: str, called: Any) -> None:
        if not self._is_running:  # the block has put it back after the end: nobody is told any more
            return
        if self._importing is not None:
            if event == "return" and frame is self._importing:
                self._importing = None
        elif event == "call":
            self._functions.called(frame)
            known = self._codes.get(id(frame.f_code))  # to hash a code object is slow
            if known is None:
                known = self._look_at(frame)
            if not known.is_trusted:
                self._maker = None
            if known.takes_context:
                self._functions.context_is_seen(arguments(frame)[0])
            if known.reads is not None and known.reads.found:
                self._listener.note_places(known.reads.found)
            if known.gives_address:
                self._note_address(frame.f_locals.get("self"))
            if known.is_collective:
                self._listener.note_collective()
        elif event == "c_call":
            if called.__name__ in _MAKERS:
                self._maker = called
            if called.__name__ == "apply":
                self._functions.applied(frame, called)
            if called not in self._harmless:
                self._note_call(frame, called)
        else:
            if called is self._maker:
                self._maker = None
            self._functions.ended(frame, event, called)

    @torch._disable_dynamo
    def _look_at(self, frame: types.FrameType) -> _Code:
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        places = None
        is_kept = True  # what a compiler calls, the block may call later, and reads it then
        if name == "<module>" and is_import(frame):
            self._importing = frame
        elif "__name__" not in frame.f_globals and COMPILED_CODE in calls_under_way(frame):
            pass  # torch.compile has generated it, and checks by itself whether what it reads has changed
        elif not is_library(module) or module in _READABLE_LIBRARIES:
            is_kept = not is_of_compiler(calls_under_way(frame))
            places = self._places_of(frame) if is_kept else None
        collective = is_collective(module, name)
        takes_context = isinstance(next(iter(arguments(frame)), None), BackwardCFunction)
        is_launch = module.startswith("triton.") and name in _LAUNCHES
        gives_address = is_launch or (module == "torch._tensor" and name in _ADDRESSES)
        found = _Code(frame.f_code, places, collective, takes_context, gives_address, is_trusted(module))
        if is_kept:
            self._codes[id(frame.f_code)] = found
        return found

    def _note_call(self, frame: types.FrameType, called: Any) -> None:
        owner: Any = getattr(called, "__self__", None)
        name = called.__name__
        if reads_data(owner, name):
            if not is_ours(frame):
                self._listener.note_read()
                if writes_data(owner, name):
                    self._listener.note_write(owner)
        elif hands_over_work(owner, name):
            if not is_of_compiler(calls_under_way(frame)):
                self._listener.note_read()
                self._note_address(None)
        elif name in _HOOKS and isinstance(owner, torch.Tensor | torch.autograd.graph.Node):
            if not is_of_compiler(calls_under_way(frame)):  # AOTAutograd sets some while it traces the block
                self._listener.note_hook()
        elif name in _ADDRESSES or _is_of_extension(owner, called):
            if not is_ours(frame):
                self._note_address(owner)
        elif not isinstance(owner, torch.Tensor):
            source = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__module__
            source = owner.__module__ if isinstance(owner, type) else source
            is_outside = source in _OUTSIDE and name not in _READ_NOTHING
            is_read = (is_outside or (source == "sys" and name in _FRAMES)) and is_for_user(frame)
            if is_read or (source in RANDOM and not is_random_of_no_account(frame, name)):
                what = f"{source.lstrip('_')}.{name} in {frame.f_code.co_name}"
                self.sources.setdefault(what, is_put_back(owner))
            elif isinstance(owner, types.ModuleType) and source not in _OUTSIDE and name not in _FRAMES:
                self._harmless.add(called)  # of a bound method, each call makes another object

    def _note_address(self, owner: Any) -> None:
        """The address of `owner` is given away, if that is a tensor; if not, that of any tensor may be."""
        self._listener.note_address(owner if isinstance(owner, torch.Tensor) else None)

    def _places_of(self, frame: types.FrameType) -> CodePlaces:
        """What the code of the frame reads, which is about to run for the first time."""
        places = CodePlaces(frame.f_code)
        places.add_globals(frame)
        if not places.add_imports(frame.f_globals):
            self._not_imported.append((frame.f_code, frame.f_globals))
        self._note(places)
        return places

    def _note(self, places: CodePlaces) -> None:
        self.reads.note(places.found)
        self.sources.update(places.sources)


class _Paused:
    """A context in which a watch is paused. One of `contextlib` would take ten calls that are watched."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.pause()

    def __exit__(self, *_: object) -> None:
        self._watch.resume()


def _is_of_extension(owner: Any, called: Any) -> bool:
    """Whether it is a function in C++ of a package that is not in `TRUSTED`."""
    return is_pybinds(owner) and str(called.__module__).partition(".")[0] not in TRUSTED


# Python also calls these while compiled code is traced for the first time: Dynamo must not compile them. `skip_code`
# costs an event nothing, but covers one function only. Those that call into other files, to read what a function
# refers to, run with Dynamo off.
for _each in (*vars(Watch).values(), reads_data, writes_data, hands_over_work, is_pybinds, _is_of_extension):
    if isinstance(_each, types.FunctionType) and not hasattr(_each, "__wrapped__"):
        skip_code(_each.__code__)
