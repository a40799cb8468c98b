"""Record a call, and learn from it: what may be replayed, its block type with all costs, where its outliers are."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from types import CodeType
from typing import NamedTuple

from ds_adacc.execute.block import Block
from ds_adacc.execute.incoming import Incoming
from ds_adacc.execute.variant import Variant
from ds_adacc.plan.block_type import KnownType
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.profiler import Profiler
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import flatten, hooks_on
from ds_adacc.python_state.guards import Guards, holds, unreadable
from ds_adacc.python_state.kept_results import KeptResults, kept_results
from ds_adacc.python_state.places import Place, marks_of
from ds_adacc.python_watch.watch import Watch
from ds_adacc.record.capture import Capture, capture
from ds_adacc.record.tensors import RecordedTensors
from ds_adacc.runtime.other_checkpoints import checkpoint_inside
from ds_adacc.runtime.plain_calls import PlainCalls
from ds_adacc.runtime.warnings import Warnings
from ds_adacc.sizes.symbolic_program import Example
from ds_adacc.sizes.symbolic_types import Constants
from ds_adacc.steps.binder import Binder
from ds_adacc.steps.step_controller import StepController
from ds_adacc.whole_blocks.beginning import Beginning
from ds_adacc.whole_blocks.choice import RecordedCall, planned_recording
from ds_adacc.whole_blocks.costs import WholeCosts, whole_profile

_KEEPS_CHANGING = "which of its graphs torch.compile runs, and that keeps changing"
_FEWER_GRAPHS = "let torch.compile make fewer graphs of it: TORCH_LOGS=recompiles tells why there are several"
_CONSTANT_RESULT = (
    "decorate the function with torch.compiler.assume_constant_result too, if its result never changes; or compute the "
    "result outside of the block, and pass it as an argument"
)


class Learned(NamedTuple):
    """What was learned from a call. `captured`: what it has shown while it was recorded.

    `variant`: what the call is, bound to its policy; None if it could not be recorded, which a warning says.
    `outliers_are_new`: whether they are those of this call. Those of a variant that a checkpoint has restored stay.
    `beginning`: that of a block which may be recomputed as a whole.
    """

    captured: Capture
    variant: Variant | None = None
    outliers_are_new: bool = False
    beginning: Beginning | None = None


class Learner:
    """Records the calls of blocks for a runtime, and learns from them."""

    def __init__(
        self,
        controller: StepController,
        binder: Binder,
        profiler: Profiler,
        codecs: CodecMaker,
        warnings: Warnings,
        plain: PlainCalls,
    ) -> None:
        self._controller = controller
        self._binder = binder
        self._profiler = profiler
        self._codecs = codecs
        self._warnings = warnings
        self._plain = plain
        # By the identity of a function's code, what was read where a result was computed which the function may keep.
        self._computed: dict[int, tuple[CodeType, dict[str, Place]]] = {}

    def learn(self, incoming: Incoming) -> Learned:
        """Record the call, and learn from it. Raises RuntimeError if only this rank cannot do so (Rule T8)."""
        block, controller = incoming.block, self._controller
        self._warn_of_repetition(incoming)
        controller.step.current_pass.see_casts()
        called = self._record(incoming)
        incoming, captured = called.incoming, called.captured
        block.places.update(captured.watch.reads.places)
        if captured.recording is None:
            self._note_failure(called)
            return Learned(captured)
        recording, costs = planned_recording(called, captured.recording, controller.agreement, controller.has_engine)
        checkpoint = checkpoint_inside(captured.watch)
        if checkpoint is not None and not recording.is_whole:  # of a block recomputed as a whole it is a part
            again = f"it calls {checkpoint} in its forward, which recomputes what runs in it, whatever the plan says"
            recording = recording.remarked(again)
        captured.recording = recording
        beginning = None if costs is None else called.beginning
        if beginning is not None:
            beginning.buffers.keep(recording)
        variant, is_recalled = self._variant(called, recording)
        self._note_computed(called)
        self._warn_of_limits(block, recording, checkpoint)
        with controller.agreement.budget.aside():
            known = self._known_type(called, variant.recording, costs)
            controller.step.current_pass.casts = known, captured.cached
        step = controller.step
        controller.note_call(block, variant.recording, incoming.call.inputs)
        self._binder.note_device(captured.tensors.device)
        is_verified_anew = step.is_tracking and variant.digest not in step.verified
        outliers_are_new = is_verified_anew or not is_recalled
        self._find_outliers(variant, known, captured.tensors, outliers_are_new)
        controller.choose_policy(block, variant)
        block.add(incoming.signature, variant)
        return Learned(captured, variant, outliers_are_new, beginning)

    def _warn_of_repetition(self, incoming: Incoming) -> None:
        """Warn if the block was recorded often, and is recorded again."""
        block, signature = incoming.block, incoming.signature
        self._warnings.recorded_again(block, block.changing_numbers(signature))
        if block.find(signature, incoming.guards) is None:  # else it is recorded to verify what is known of it
            self._warnings.recorded_at_each_size(block, block.recorded_sizes(signature, incoming.guards))

    def _record(self, incoming: Incoming) -> RecordedCall:
        """Run the call under the recorder. What that takes besides is no part of what the program takes."""
        beginning, arguments, run = None, None, incoming.call.run
        with self._controller.agreement.budget.aside():
            if incoming.signature.is_asked:  # this copies what the block may write to
                # The signature has the arguments without those of a `functools.partial` that is called.
                beginning, arguments = Beginning(incoming.call), flatten((run.args, run.keywords), [], [])
            hooks = hooks_on(chain(incoming.call.inputs, incoming.call.closure.parameters))
            captured = capture(incoming.block.name, incoming.call)
        if captured.watch.has_seen_backward and not incoming.block.differentiates:
            incoming.block.differentiates = True  # so from now on these hooks tell calls apart, this one too
            incoming = incoming._replace(signature=incoming.signature.with_hooks(hooks))
        if captured.recording is not None:
            captured.recording = captured.recording.with_held_before(incoming.signature.held_before)
        guards = {**captured.watch.reads.marks, **incoming.guards}
        return RecordedCall(incoming, guards, beginning, arguments, captured)

    def _note_failure(self, called: RecordedCall) -> None:
        """The call could not be recorded: others like it run without a plan."""
        block, signature, reason = called.incoming.block, called.incoming.signature, called.captured.reason
        if signature.is_asked and block.name in self._controller.agreement.repeated:
            raise RuntimeError(
                f"block {block.name}: backward runs its forward a second time on all ranks, as you ask for "
                f"checkpointing. But on this rank a call of it cannot be recorded: {reason}. Call it so that it can "
                "be, or without a checkpoint"
            )
        self._plain.warn(called.incoming.as_plain, reason, is_of_call=True)
        block.add(signature, Variant.failed(called.guards, block.latest(signature)))

    def _variant(self, called: RecordedCall, recording: Recording) -> tuple[Variant, bool]:
        """The variant of the recorded call, and whether a checkpoint has restored it.

        It learns from the last variant of its signature. If there is none, the run that this one resumes may have one.
        """
        incoming, guards, block = called.incoming, called.guards, called.incoming.block
        earlier = block.latest(incoming.signature)
        recalled = block.recall(recording) if earlier is None else None
        variant = recalled or Variant()
        variant.history.guards = guards
        variant.history.named = _names(recording, guards, called.captured.watch)
        changed = block.note_changes(guards)
        if earlier is not None and earlier.is_recorded:
            variant.history.succeed(earlier.history, block.had_settled, _are_same(earlier.recording, recording))
            if variant.doubt and not (earlier.doubt or recording.is_whole):
                self._warnings.doubtful(block, variant.doubt)
        if earlier is None or earlier.is_predicted:
            others = block.recorded_at_other_sizes(incoming.signature)
            if others:
                is_alike = _are_alike(others[0].recording, recording)
                variant.history.learn_at_other_sizes([other.history for other in others], is_alike)
        self._warnings.changed_again(block, changed - variant.history.ignored - variant.history.unread)
        if not recording.is_whole:  # a second forward runs whatever the block runs
            self._doubt(called, variant, recording)
        variant.recording = recording.doubted(variant.doubt)
        variant.digest = variant.recording.digest
        if earlier is not None and earlier.digest == variant.digest:
            variant.outliers = dict(earlier.outliers)
        return variant, recalled is not None

    def _doubt(self, called: RecordedCall, variant: Variant, recording: Recording) -> None:
        """Doubt the variant if the block depends on what no guard watches: then nothing of it is replayed."""
        block, remedy = called.incoming.block, None
        unwatched = called.captured.watch.unguarded or unreadable((called.incoming.signature, called.guards))
        if unwatched is None and recording.runs_compiled and block.keeps_changing_graphs:
            unwatched, remedy = _KEEPS_CHANGING, _FEWER_GRAPHS
        if unwatched is None and not any(each.is_recorded and not each.doubt for each in block.variants()):
            unwatched, remedy = self._guard_kept_results(called), _CONSTANT_RESULT
        if unwatched is not None:
            variant.history.doubt = unwatched
            self._warnings.doubtful(block, unwatched, remedy)

    def _guard_kept_results(self, called: RecordedCall) -> str | None:
        """Add to the guards what those results depend on that functions had kept, and that the block has used.

        If they were computed while another block was recorded, that is all that the other has read. If not, nothing
        tells what it is: returns the function.
        """
        for name, code in kept_results(called.guards).items():
            if not called.captured.watch.has_seen(code):
                if id(code) not in self._computed:
                    return f"{name} (functools.lru_cache: nothing tells of what they were computed)"
                _, places = self._computed[id(code)]
                called.incoming.block.places.update(places)
                called.guards.update({**marks_of(places), **called.guards})
        return None

    def _note_computed(self, called: RecordedCall) -> None:
        """Keep what was read where results were computed which their function may keep: another block may use them."""
        watch = called.captured.watch
        for mark in called.guards.values():
            if isinstance(mark, KeptResults) and watch.has_seen(mark.code):
                _, places = self._computed.setdefault(id(mark.code), (mark.code, {}))
                places.update(watch.reads.places)

    def _warn_of_limits(self, block: Block, recording: Recording, checkpoint: str | None) -> None:
        """Warn of what runs in the block over which no plan decides. `checkpoint`: as of `checkpoint_inside`."""
        if recording.hides_compiled:
            self._warnings.compiled(block)
        for op in recording.graph_ops:
            if op.refusal:
                self._warnings.never_recomputed(block, op.short_name, op.refusal)
        if checkpoint is not None:
            self._warnings.checkpoints_inside(block, checkpoint)

    def _known_type(self, called: RecordedCall, recording: Recording, costs: WholeCosts | None) -> KnownType:
        """The block type of a recording, measured if it is new. `costs`: of a block as one operator."""
        block, signature = called.incoming.block, called.incoming.signature
        example = Example(signature.sizes, recording)
        relatives = block.relatives(signature, called.guards)
        constants = {name: relative.recording.constants for name, (relative, _) in relatives.items()}
        known = self._controller.agreement.known_types.get(recording.digest)
        if known is None:
            known = self._add_type(example, called.captured, constants, costs)
        else:
            if costs is not None:
                known.note_more(whole_profile(recording, costs))
            self._controller.planning.new_sizes.symbolic_types.learn(example, known.profile, constants)
        if block.latest(signature) is None:  # later, one batch with an Inf would forbid codecs for the rest of the run
            known.narrow([self._codecs.on_offer(value, recording) for value in recording.values])
        return known

    def _add_type(
        self, example: Example, captured: Capture, relatives: Mapping[str, Constants], costs: WholeCosts | None
    ) -> KnownType:
        """Measure a new block type. `relatives`: as of `SymbolicTypes.learn`; `costs`: as of `_known_type`."""
        controller, recording = self._controller, example.recording
        symbolic_types, adopter = controller.planning.new_sizes.symbolic_types, controller.planning.new_sizes.adopter
        controller.step.close()  # measuring operators would be counted as the step's own
        like = symbolic_types.like(relatives, example)
        if costs is not None:
            profile = whole_profile(recording, costs)
        else:
            profile = symbolic_types.profile(like, example) or self._profiler.profile(recording, captured)
        known = controller.agreement.add(recording, profile)
        if costs is not None and (resumed := self._profiler.remembered.get(recording.digest)) is not None:
            known.resume_whole(resumed)
        symbolic_types.learn(example, profile, relatives)
        if like is not None and symbolic_types.of(like) is symbolic_types.of(recording.digest):
            adopter.adopt_for_type(known, like, controller.step.current_pass.called)
        reason = controller.planning.trials.admit(known, recording, captured)
        if reason is not None:
            self._warnings.unmeasurable(known.recording.name, reason)
        return known

    def _find_outliers(self, variant: Variant, known: KnownType, tensors: RecordedTensors, anew: bool) -> None:
        """Find the outlier channels in the data. Channels that the variant has already stay, unless `anew` is true."""
        for index in known.outlier_values:
            if index in variant.outliers and not anew:
                (order, count), device = variant.outliers[index], tensors[index].device
                variant.outliers[index] = order.to(device), count.to(device)
            else:
                variant.note_outliers(index, *self._codecs.outliers(tensors[index], known.recording.values[index]))
            if known.plan is None:
                known.note_outliers(index, int(variant.outliers[index][1]))


def _are_same(one: Recording, other: Recording) -> bool:
    """Whether both are the same program, with the same constants. (The text tells 0.0 from -0.0.)"""
    return one.digest == other.digest and repr(one.constants) == repr(other.constants)


def _are_alike(one: Recording, other: Recording) -> bool:
    """Whether both run the same operators with the same constants, perhaps at other sizes. Indices are not compared."""
    is_same = [op.func for op in one.ops] == [op.func for op in other.ops]
    return is_same and repr(one.constants) == repr(other.constants)


def _names(recording: Recording, guards: Guards, watch: Watch) -> frozenset[str] | None:
    """What `GuardHistory.named` is. Compiled code, earlier results and a `partial` of `getattr` show no names."""
    is_hidden = recording.runs_compiled or kept_results(guards) or any(holds(guards, each) for each in (getattr, vars))
    return None if is_hidden else watch.names()
