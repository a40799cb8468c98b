"""Runs the calls of every block under the plan in force, and records new blocks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ds_adacc.config import UNBOUNDED, AdaccConfig
from ds_adacc.execute.block import Block, Variant
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.execute.call import Call
from ds_adacc.execute.registry import Registry
from ds_adacc.log import get_logger
from ds_adacc.observe.outlier_tracker import OutlierTracker
from ds_adacc.observe.rectifier import Rectifier
from ds_adacc.plan.agreement import Agreement
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.ranks import Ranks
from ds_adacc.profile.cache import ProfileCache
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.probe import Probe
from ds_adacc.profile.profiler import Profiler
from ds_adacc.program.arguments import tensors_in
from ds_adacc.program.signature import (
    Signature,
    aliases,
    ambient,
    describe,
    flatten,
    surroundings,
    why_unrecordable,
)
from ds_adacc.program.slots import unpack
from ds_adacc.program.symbolic_program import Example
from ds_adacc.python_state.closure import closure_of, with_modules
from ds_adacc.python_state.reading import Unreadable
from ds_adacc.python_state.watch import marks_of
from ds_adacc.record.capture import not_recorded_now
from ds_adacc.record.follower import follow, not_followed_now
from ds_adacc.report.journal import Journal
from ds_adacc.runtime.binder import Binder
from ds_adacc.runtime.checkpointed import refuse_checkpointed
from ds_adacc.runtime.incoming import Incoming
from ds_adacc.runtime.learner import Learner
from ds_adacc.runtime.saved_state import RuntimeState
from ds_adacc.runtime.seen_programs import SeenPrograms
from ds_adacc.runtime.step_controller import StepController
from ds_adacc.runtime.warnings import Warnings


class Runtime:
    """Runs the calls of the blocks. Its `controller` divides them into steps.

    `calls` counts the calls, and `recordings` counts the recorded ones. With an engine attached (`stepped`), the engine
    says when a step ends, and the rectifier runs if the section enables it.
    """

    def __init__(
        self,
        config: AdaccConfig,
        ranks: Ranks | None = None,
        stepped: bool = False,
        cache: ProfileCache | None = None,
        journal: Journal | None = None,
    ) -> None:
        ranks = ranks or Ranks()
        self.config = config
        self.codecs = CodecMaker(config)
        self.profiler = Profiler(config, self.codecs, cache)
        self._binder = Binder(self.codecs)
        self.controller = StepController(
            Coordinator(Agreement(config, self.codecs), ranks),
            self._binder,
            ranks,
            journal or Journal(None),
            stepped,
            Rectifier(config.rectifier, ranks) if stepped and config.rectifier.enabled else None,
        )
        self.calls = 0
        self.recordings = 0
        self._thread: int | None = None  # that runs a block now
        self.warnings = Warnings()
        self._seen = SeenPrograms()
        self._learner = Learner(self.controller, self.profiler, self.codecs, self.warnings)
        if config.codecs in UNBOUNDED and config.max_gradient_error is None:
            get_logger().warning(
                'adacc.codecs = "%s" is for comparisons, as it does not bound the error of the gradient. For training, '
                'use "auto", or set "max_gradient_error"',
                config.codecs,
            )

    @property
    def blocks(self) -> Registry:
        """The blocks that have run so far."""
        return self.controller.blocks

    @property
    def agreement(self) -> Agreement:
        """The block types recorded so far, and the policies that the ranks have agreed on for them."""
        return self.controller.agreement

    @property
    def is_inside(self) -> bool:
        """Whether this thread runs a block now."""
        return self._thread == threading.get_ident()

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)`. The tensors that its backward needs are held as the plan says."""
        owner = with_modules(function, args, kwargs)
        return self.run(self.blocks.of(owner), owner, function, args, kwargs)

    def run(self, block: Block, owner: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` as a call of `block`. `owner` holds the block's tensors and numbers."""
        if self._is_left_alone(block):
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        inner: list[torch.Tensor] = []
        key = flatten((args, kwargs), tensors, inner)
        reach = closure_of(owner)
        tensors += [t for t in reach.tensors if not isinstance(t, nn.Parameter)]
        reason = why_unrecordable(tensors)
        if reason is not None:
            self.warnings.fallen_back(block, reason)
            return function(*args, **kwargs)
        self.calls += 1
        if not (block.begins_gradient or _require_gradient(chain(tensors, inner, reach.parameters))):
            output = function(*args, **kwargs)
            block.begins_gradient = _require_gradient(tensors_in(output))
            if not block.begins_gradient:
                self.warnings.holds_nothing(block)
            return output
        self._thread = threading.get_ident()
        try:
            self.controller.begin_call()
            block.last_reading, held = reach.read(marks_of(block.places), block.last_reading)
            guards = block.last_reading.marks
            shared = aliases(tensors, [*inner, *held])
            signature = Signature(key, describe(tensors), shared, ambient(), getattr(owner, "training", None))
            run = functools.partial(function, *args, **kwargs)
            return self._record_or_run(Incoming(block, signature, guards, reach, tensors, run))
        except Unreadable as reason:
            self.warnings.fallen_back(block, str(reason))
            return function(*args, **kwargs)
        except BaseException:
            self.controller.step.drop_pass()
            raise
        finally:
            self._thread = None

    def _is_left_alone(self, block: Block) -> bool:
        """Whether the call of the block that begins now runs as if there were no ds_adacc.

        A call inside a block is part of that block, and without gradients nothing is held (Rule T3).
        """
        is_inside = self._thread is not None
        if is_inside or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            if is_inside and not self.is_inside:
                self.warnings.fallen_back(block, "another thread runs a block at the same time")
            if not (self.recordings or is_inside or torch.compiler.is_compiling()):
                refuse_checkpointed(block.name)  # a reentrant checkpoint runs forward without gradients
            return True
        reason = surroundings()
        if reason is None:
            return False
        if not self.recordings:
            refuse_checkpointed(block.name)  # a checkpoint that is not reentrant has hooks of its own around it
        self.warnings.fallen_back(block, reason)
        return True

    def _record_or_run(self, incoming: Incoming) -> Any:
        variant = incoming.block.find(incoming.signature, incoming.guards) or self._predict(incoming)
        if variant is None or self._is_to_verify(variant):
            reason = not_recorded_now(incoming.reach)
            if reason is None:
                return self._record(incoming)
            if variant is None:
                self.warnings.fallen_back(incoming.block, reason)
                return incoming.run()
        return self._run_under_policy(incoming, variant)

    def _predict(self, incoming: Incoming) -> Variant | None:
        """A new variant for a call that differs from earlier ones in input sizes only. None: it must be recorded."""
        block, signature, guards = incoming.block, incoming.signature, incoming.guards
        like, its_sizes = block.relative(signature, guards)
        if like is None:
            return None
        self.controller.bindings.limit_adopted(self.controller.step)
        example = Example(its_sizes, like.recording)
        predicted = self.controller.new_sizes.at_sizes(like.digest, example, signature.sizes, incoming.tensors)
        if predicted is None:
            return None
        known, recording = predicted
        variant = like.at_other_sizes(guards, known.recording.digest, recording)
        self.controller.bind(block, variant)
        block.add(signature, variant)
        return variant

    def _run_under_policy(self, incoming: Incoming, variant: Variant) -> Any:
        block, bound = incoming.block, variant.bound
        if bound is None or bound.prefetcher is None:
            self._binder.pass_over()
        if bound is None:
            return incoming.run()
        self.controller.note_call(variant.digest, block)
        step = self.controller.step
        # Where everything is retained and nobody looks on, no hooks are needed (Rule T4).
        is_watched = step.observer is not None or step.is_tracking or variant.trial is not None
        is_followed = self._is_to_follow(incoming, variant)
        reason = not_followed_now(bound.recording) if is_followed else None
        if reason is not None:
            self.warnings.fallen_back(block, reason)
        if reason is not None or (bound.is_trivial and not is_watched):
            output = incoming.run()
            step.note_plain(output)
            return output
        probe = self._probe(incoming, variant)
        call, pack, done = self._begin_call(
            incoming,
            variant,
            step.is_tracking,
            times_forward=not is_followed and probe is None,  # a check takes ten times as long as the forward
            times_backward=probe is None,
        )
        if probe is not None:
            pack = probe.pack(pack)
        if bound.recording.runs_compiled:
            pack = torch.compiler.disable(pack)  # at a graph break, dynamo would compile it
        try:
            if is_followed:
                output, is_as_predicted = follow(
                    bound.recording, incoming.tensors, incoming.reach, incoming.run, pack, call.diverge
                )
                if is_as_predicted:
                    self._seen.add(self._key(incoming, variant))
                    variant.is_unseen = False
            else:
                with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                    output = incoming.run()
            if probe is not None:
                output = probe.watch(output)
            done()
        finally:
            call.close()
        if call.diverged:
            step.note_plain(output)
        return output

    def _is_to_follow(self, incoming: Incoming, variant: Variant) -> bool:
        """Whether the call replays operators of a program that is predicted, and that no block was seen to run."""
        if variant.is_unseen and variant.bound.replays:
            variant.is_unseen = self._key(incoming, variant) not in self._seen
            return variant.is_unseen
        return False

    def _key(self, incoming: Incoming, variant: Variant) -> Hashable:
        return self._seen.key(variant.recording, incoming.signature, incoming.block, self.blocks.all())

    def _probe(self, incoming: Incoming, variant: Variant) -> Probe | None:
        trials, device, step = self.controller.trials, self.controller.device, self.controller.step
        return trials.probe(incoming.block, variant, incoming.tensors, device, step)

    def _begin_call(
        self,
        incoming: Incoming,
        variant: Variant,
        tracking: bool,
        noted: Mapping[int, torch.Tensor] | None = None,
        times_forward: bool = True,
        times_backward: bool = True,
    ) -> tuple[Call, Callable[[torch.Tensor], Any], Callable[[], None]]:
        """A call that is about to begin, its pack hook, and a function to call after its forward.

        `noted`: the buffers and the states of random generators, if the tensors are packed only after the forward.
        `times_forward`, `times_backward`: as of `CallMoments`.
        """
        bound, inputs = variant.bound, incoming.tensors
        assert bound is not None
        observer = self.controller.step.observer
        # The observer comes first: the call stores the block's inputs, and these bytes are the call's own.
        if observer is not None:
            ticket = observer.begin(variant, incoming.block, times_forward, times_backward)
        told = self.warnings.diverged
        if variant.is_predicted:
            told = functools.partial(self._doubt_prediction, incoming.block, variant)
        call = Call(bound, inputs, told, noted)
        pack: Callable[[torch.Tensor], Any] = call.pack
        if tracking:
            values = self.agreement.known_types[variant.digest].tracked_values(self.config.rectifier.roles)
            pack = OutlierTracker(call, variant, self.codecs, values, inputs)
        if observer is None:
            call.forward = self.controller.step.forward()
            return call, pack, _nothing
        return call, *observer.watch(ticket, call, pack)

    def _record(self, incoming: Incoming) -> Any:
        """Record the call, and pack what its forward has saved as the policy says that its variant runs from now on."""
        refuse_checkpointed(incoming.block.name)
        self.recordings += 1
        captured, variant, has_ranked = self._learner.learn(incoming)
        output = captured.output
        if variant is None:
            return output
        self._seen.add(self._key(incoming, variant))
        step = self.controller.step
        step.verified.add(variant.digest)
        noted = {**captured.buffers, **captured.states}
        probe = self._probe(incoming, variant)
        tracking = step.is_tracking and not has_ranked
        call, pack, done = self._begin_call(
            incoming, variant, tracking, noted, times_forward=False, times_backward=probe is None
        )
        if probe is not None:
            probe.slots, probe.noted = captured.slots, noted
        try:
            captured.hand_over(pack)
            done()
        finally:
            call.close()
        if call.diverged:
            step.note_plain(output)
        return output if probe is None else probe.watch(output)

    def _is_to_verify(self, variant: Variant) -> bool:
        """Whether to record this call again. A tracking step does so for the first call of each block type.

        The first calls of a step come while few other tensors are held.
        """
        step = self.controller.step
        return step.is_tracking and variant.recording is not None and variant.digest not in step.verified

    def _doubt_prediction(self, block: Block, variant: Variant, bound: BoundPolicy, position: int) -> None:
        """Have the next call of this size recorded: what it saves does not follow its input sizes as guessed."""
        block.drop(variant)
        self.controller.new_sizes.symbolic_types.doubt(variant.digest)
        self.warnings.mispredicted(bound, position)

    # -- checkpoints

    def state(self) -> RuntimeState:
        """The state to save in a checkpoint. Call `controller.state_is_saved` first."""
        known_types = self.agreement.known_types
        profiles = {digest: known.profile for digest, known in known_types.items()}
        errors = {digest: known.errors for digest, known in known_types.items() if known.errors_are_measured}
        # What the run before has left, as far as a block may still come back to it.
        kept = {digest for block in self.blocks.every() for digest in block.digests}
        past = {digest: each for digest, each in self.profiler.remembered.items() if digest in kept}
        past_errors = {digest: each for digest, each in self.controller.trials.remembered.items() if digest in kept}
        return RuntimeState(self.controller.state(), {**past, **profiles}, {**past_errors, **errors})

    def restore(self, state: RuntimeState, blocks: Sequence[Mapping[str, Any]]) -> None:
        """Continue from a saved state. `blocks` is what `StepController.blocks_to_plain` returned."""
        self.profiler.remembered = state.profiles
        self.controller.trials.remembered = state.errors
        self.controller.restore(state.controller, blocks)


def _require_gradient(tensors: Iterable[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _nothing() -> None:
    pass
