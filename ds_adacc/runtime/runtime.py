"""Runs the calls of every block under the plan in force, and records new blocks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from ds_adacc.config import UNBOUNDED, AdaccConfig
from ds_adacc.execute.block import Block
from ds_adacc.execute.incoming import Incoming, PlainCall
from ds_adacc.execute.variant import Variant
from ds_adacc.log import get_logger
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.ranks import Ranks
from ds_adacc.profile.cache import ProfileCache
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.profiler import Profiler
from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.signature import (
    Signature,
    aliases,
    ambient,
    describe,
    flatten,
    hooks_on,
    own_parameters,
    surroundings,
    why_unrecordable,
)
from ds_adacc.python_state.closure import closure_of, with_modules
from ds_adacc.python_state.places import marks_of
from ds_adacc.python_state.reading import UnreadableModule
from ds_adacc.python_watch.watch import Watch
from ds_adacc.record.block_call import BlockCall
from ds_adacc.record.capture import not_recorded_now
from ds_adacc.report.journal import Journal
from ds_adacc.runtime.learner import Learner
from ds_adacc.runtime.other_checkpoints import refuse_checkpointed
from ds_adacc.runtime.plain_calls import PlainCalls
from ds_adacc.runtime.planned_calls import PlannedCalls
from ds_adacc.runtime.warnings import Warnings
from ds_adacc.sizes.symbolic_program import Example
from ds_adacc.steps.binder import Binder
from ds_adacc.steps.saved_state import State
from ds_adacc.steps.step_controller import StepController
from ds_adacc.whole_blocks.asked import Asked

_OTHER_THREAD = "another thread runs a block at the same time"


class Runtime:
    """Runs the calls of the blocks. Its `controller` divides them into steps.

    All calls come to `run`: those of an engine's blocks by their wrapped forwards (`wrap.py`), and those of functions
    that the program gives to its checkpoint function by `asked_functions.py`. `checkpoint` is for who has the runtime
    at hand, as tests and benchmarks do.

    `blocks`: those that have run so far. `agreement`: their block types, and the policies that ranks have agreed on.
    `calls` counts the calls, and `recordings` counts the recorded ones. If it `has_engine`, the engine says when a step
    ends, and the rectifier runs if the section enables it.
    """

    def __init__(
        self,
        config: AdaccConfig,
        ranks: Ranks | None = None,
        has_engine: bool = False,
        cache: ProfileCache | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.config = config
        self.codecs = CodecMaker(config)
        self.profiler = Profiler(config, self.codecs, cache)
        self._binder = Binder(self.codecs)
        self.controller = StepController(
            Coordinator(Agreement(config, self.codecs), ranks or Ranks()),
            self._binder,
            journal or Journal(None),
            has_engine,
        )
        self.blocks = self.controller.blocks
        self.agreement = self.controller.agreement
        self.calls = 0
        self.recordings = 0
        self._threads: list[int] = []  # that call a block now; the first of them runs it
        self.warnings = Warnings(self.agreement.log)
        self.asked = Asked()
        # Not a method of this object: it would then be kept alive until Python's collector comes.
        inside = functools.partial(_inside, self._threads)
        self._plain = PlainCalls(self.agreement, self.warnings, inside)
        self._planned = PlannedCalls(self.controller, self._binder, self.codecs, self.warnings, self._plain, inside)
        self._learner = Learner(self.controller, self._binder, self.profiler, self.codecs, self.warnings, self._plain)
        if config.codecs in UNBOUNDED and config.max_gradient_error is None:
            get_logger().warning(
                'adacc.codecs = "%s" is for comparisons, as it does not bound the error of the gradient. For training, '
                'use "auto"%s',
                config.codecs,
                "" if config.forces_compression else ', or set "max_gradient_error"',
            )

    @property
    def is_inside(self) -> bool:
        """Whether this thread runs a block now."""
        return threading.get_ident() in self._threads

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)`. The tensors that its backward needs are held as the plan says."""
        owner = with_modules(function, args, kwargs)
        return self.run(self.blocks.of(owner), owner, function, args, kwargs)

    def run(
        self,
        block: Block,
        owner: Callable[..., Any],
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        is_asked: bool = False,
    ) -> Any:
        """Run `function(*args, **kwargs)` as a call of `block`. `owner` holds the block's tensors and numbers.

        `is_asked`: as of `Signature`.
        """
        run = functools.partial(function, *args, **kwargs)
        if self._holds_nothing(block):
            return run()
        plain = PlainCall(block, run, is_asked)
        if self._threads:
            return self._plain.run_on_this_rank(plain, _OTHER_THREAD)
        reason = surroundings()
        if reason is not None:
            if not self.recordings:
                refuse_checkpointed(block.name)  # a checkpoint that is not reentrant has hooks of its own around it
            return self._plain.fall_back(plain, reason)
        tensors: list[torch.Tensor] = []
        inner: list[torch.Tensor] = []
        # What the call is given: `tensors` in its arguments and in what the function reaches, `inner` ones in objects
        # among the arguments, and in the key all else. `held`, below, are those that the block's own modules hold.
        key = flatten((args, kwargs), tensors, inner)
        closure = closure_of(owner)
        tensors += [t for t in closure.tensors if not isinstance(t, nn.Parameter)]
        reason = why_unrecordable(tensors)
        if reason is not None:
            return self._plain.fall_back(plain, reason, is_of_call=True)
        self.calls += 1
        if not (block.begins_gradient or _require_gradient(chain(tensors, inner, closure.parameters))):
            output = run()
            block.begins_gradient = _require_gradient(tensors_in(output))
            if not block.begins_gradient:
                self.warnings.holds_nothing(block)
            return output
        call = BlockCall(tensors, inner, closure, run)
        thread = threading.get_ident()
        # Python raises KeyboardInterrupt where a function in C returns. So what `append` has done is undone even then.
        try:
            self._threads.append(thread)
            if self._threads[0] == thread:
                return self._run_exclusively(plain, key, getattr(owner, "training", None), call)
        finally:
            self._threads.remove(thread)
        return self._plain.run_on_this_rank(plain, _OTHER_THREAD)

    def run_by_torch(self, block: Block, run: functools.partial[Any], reason: str) -> Any:
        """Run a call that the program has asked to checkpoint under torch's checkpoint, and warn of the reason."""
        return self._plain.fall_back(PlainCall(block, run, is_asked=True), reason)

    def _run_exclusively(self, plain: PlainCall, key: Hashable, training: bool | None, call: BlockCall) -> Any:
        """Run a call while no other thread runs a block. `key`: as of `flatten`; `training`: as of `Signature`."""
        block = plain.block
        try:
            self.controller.begin_call()
            in_globals: list[torch.Tensor] = []
            try:
                reading, held = call.closure.read(marks_of(block.places, in_globals), block.last_reading)
            except UnreadableModule as reason:
                return self._plain.fall_back(plain, str(reason))
            block.last_reading = reading
            own = own_parameters(call.inputs, call.closure.parameters)
            hooks = hooks_on(chain(call.inputs, call.closure.parameters)) if block.differentiates else ()
            shared = aliases(call.inputs, [*call.inner, *held]), own, hooks
            held_before = self.controller.held_before(block, call.inputs)
            signature = Signature(key, describe(call.inputs), shared, ambient(), training, held_before, plain.is_asked)
            return self._record_or_run(Incoming(block, signature, reading.marks, [*held, *in_globals], call))
        except BaseException:
            self.controller.step.drop_pass()
            raise

    def _holds_nothing(self, block: Block) -> bool:
        """Whether the call of the block that begins now holds nothing of its own for a backward.

        A call inside a block is part of that block, and without gradients nothing is held (Rule T3).
        """
        if self.is_inside or torch.compiler.is_compiling():
            return True
        if torch.is_grad_enabled():
            return False
        if not (self.recordings or self._threads):
            refuse_checkpointed(block.name)  # a reentrant checkpoint runs forward without gradients
        return True

    def _record_or_run(self, incoming: Incoming) -> Any:
        incoming.block.calls_since_change += 1
        variant = incoming.block.find(incoming.signature, incoming.guards) or self._predict(incoming)
        if variant is None or self._is_to_verify(variant):
            reason = not_recorded_now(incoming.call.closure)
            if reason is None:
                return self._record(incoming)
            if variant is None:
                if (of_this_rank := Watch.refusal()) is not None:
                    return self._plain.run_on_this_rank(incoming.as_plain, of_this_rank)
                return self._plain.fall_back(incoming.as_plain, reason)
        return self._planned.run(incoming, variant)

    def _predict(self, incoming: Incoming) -> Variant | None:
        """A new variant for a call that differs from earlier ones in input sizes only. None: it must be recorded."""
        block, signature, guards = incoming.block, incoming.signature, incoming.guards
        new_sizes = self.controller.planning.new_sizes
        self.controller.limit_adopted()
        relatives = block.relatives(signature, guards)

        def distance(digest: str) -> float:
            return signature.sizes.distance(relatives[digest][1])

        for digest in new_sizes.symbolic_types.first_of_each(relatives, distance):
            like, its_sizes = relatives[digest]
            example = Example(its_sizes, like.recording)
            called = self.controller.step.current_pass.called
            predicted = new_sizes.predict(example, signature.sizes, incoming.call.inputs, called)
            if predicted is not None and predicted.recording.digest not in block.mispredicted:
                variant = like.at_other_sizes(guards, predicted.recording, predicted.has_varied_numbers)
                self.controller.choose_policy(block, variant)
                block.add(signature, variant)
                return variant
        return None

    def _record(self, incoming: Incoming) -> Any:
        """Record the call, and pack what its forward has saved as the policy says that its variant runs from now on."""
        refuse_checkpointed(incoming.block.name)
        self.recordings += 1
        if incoming.block.is_always_new:
            self.warnings.always_new(incoming.block)
        learned = self._learner.learn(incoming)
        if learned.variant is None:
            return learned.captured.output
        self.controller.step.verified.add(learned.variant.digest)
        return self._planned.pack_recorded(incoming, learned)

    def _is_to_verify(self, variant: Variant) -> bool:
        """Whether to record this call again. A tracking step does so for the first call of each block type.

        The first calls of a step come while few other tensors are held. Of a block as one operator nothing is tracked.
        """
        step = self.controller.step
        is_known = not variant.is_recorded or variant.recording.is_whole or variant.digest in step.verified
        return step.is_tracking and not is_known

    # -- checkpoints

    def state(self) -> State:
        """The state to save in a checkpoint, between two steps. Call `controller.state_is_saved` first."""
        controller, agreement = self.controller, self.agreement
        known_types, indices = agreement.known_types, agreement.forward_order.indices
        profiles = {digest: known.profile for digest, known in known_types.items()}
        errors = {digest: known.errors for digest, known in known_types.items() if known.errors_are_measured}
        # What the run before has left, as far as a block may still come back to it.
        kept = {digest for block in self.blocks.every() for digest in block.digests}
        past = {digest: each for digest, each in self.profiler.remembered.items() if digest in kept}
        past_errors = {digest: each for digest, each in controller.planning.trials.remembered.items() if digest in kept}
        return State(
            agreement=agreement.state(),
            plan=controller.plan,
            observation=controller.observation,
            has_run_a_plan=controller.planning.has_run_a_plan,
            corrected=controller.planning.calibration.corrected,
            schedule=controller.planning.schedule,
            profiles={**past, **profiles},
            errors={**past_errors, **errors},
            blocks=[{**block.to_plain(), "indices": indices(block)} for block in self.blocks.every()],
            seeds=self.codecs.generator.get_state(),
        )

    def restore(self, state: State) -> None:
        """Continue from a saved state. Every rank must call, with states of one step.

        All blocks are recorded again. Blocks that the state has policies for run under those policies at once.
        """
        self.profiler.remembered = state.profiles
        self.controller.restore(state)
        if state.seeds is not None:
            self.codecs.generator.set_state(state.seeds)


@contextmanager
def _inside(threads: list[int]) -> Iterator[None]:
    """Run a second forward of a block: what it calls is part of the block (Rule T3). `threads`: those in a block."""
    thread = threading.get_ident()
    try:
        threads.append(thread)
        yield
    finally:
        threads.remove(thread)


def _require_gradient(tensors: Iterable[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)
