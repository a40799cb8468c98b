"""Record a call, and learn from it: what may be replayed, its block type with all costs, where its outliers are."""

from __future__ import annotations

from ds_adacc.execute.block import Block, Variant
from ds_adacc.plan.block_type import KnownType
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.profiler import Profiler
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import Signature
from ds_adacc.python_state.guards import unreadable
from ds_adacc.python_state.kept_results import KeptResults, kept_results
from ds_adacc.python_state.places import marks_of
from ds_adacc.python_state.watch import Watch
from ds_adacc.record.capture import Capture, capture
from ds_adacc.record.tensors import RecordedTensors
from ds_adacc.runtime.checkpointed import checkpoint_inside
from ds_adacc.runtime.incoming import Incoming
from ds_adacc.runtime.step_controller import StepController
from ds_adacc.runtime.warnings import Warnings

_KEEPS_CHANGING = "which of its graphs torch.compile runs, and that keeps changing"
_FEWER_GRAPHS = "let torch.compile make fewer graphs of it: TORCH_LOGS=recompiles tells why there are several"


class Learner:
    """Records the calls of blocks for a runtime, and learns from them."""

    def __init__(self, controller: StepController, profiler: Profiler, codecs: CodecMaker, warnings: Warnings) -> None:
        self._controller = controller
        self._profiler = profiler
        self._codecs = codecs
        self._warnings = warnings
        self._computed: list[Watch] = []  # those that have seen a result computed which its function may keep

    def learn(self, incoming: Incoming) -> tuple[Capture, Variant | None, bool]:
        """What a call has shown while it was recorded, and the variant that it is, bound to its policy.

        The variant is None if the call could not be recorded, which a warning says. The flag tells whether the outliers
        were looked for: those of a variant that a checkpoint has restored stay.
        """
        block, signature, controller = incoming.block, incoming.signature, self._controller
        budget = controller.agreement.budget
        self._warnings.recorded_again(block, block.changing_numbers(signature))
        with budget.aside():
            captured = capture(block.name, incoming.call)
        guards = {**captured.watch.reads.marks, **incoming.guards}
        block.places.update(captured.watch.reads.places)
        if captured.recording is None:
            self._warnings.fallen_back(block, captured.reason)
            block.add(signature, Variant.failed(guards, block.latest(signature)))
            return captured, None, False
        captured.recording = captured.recording.with_held(signature.held)
        recalled = block.recall(captured.recording) if block.latest(signature) is None else None
        variant = recalled or Variant()
        variant.guards = guards
        variant.recording = self._recording(block, signature, variant, captured)
        variant.digest = variant.recording.digest
        with budget.aside():
            known = self._known_type(incoming, captured, variant)
        step = controller.step
        controller.note_call(block, variant.recording, incoming.call.inputs)
        controller.note_device(captured.tensors.device)
        is_verified_anew = step.is_tracking and variant.digest not in step.verified
        ranks = recalled is None or is_verified_anew
        self._rank_outliers(variant, known, captured.tensors, ranks)
        controller.bind(block, variant)
        block.add(signature, variant)
        return captured, variant, ranks

    def _recording(self, block: Block, signature: Signature, variant: Variant, captured: Capture) -> Recording:
        """The recording; nothing of it is replayed if it depends on what no guard watches."""
        earlier = block.latest(signature)
        if earlier is not None and earlier.recording is not None:
            variant.succeed(earlier)
            self._warnings.changed_again(block, variant)
            if variant.doubt and not earlier.doubt:
                self._warnings.doubtful(block, variant.doubt)
        unwatched = captured.watch.unguarded or unreadable((signature, variant.guards))
        if captured.recording.runs_compiled and block.keeps_changing_graphs:
            unwatched = unwatched or _KEEPS_CHANGING
        if not any(each.recording is not None and not each.doubt for each in block.variants()):
            unwatched = unwatched or self._kept_result(block, variant, captured.watch)
        codes = [mark.code for mark in (variant.guards or {}).values() if isinstance(mark, KeptResults)]
        if any(code is not None and captured.watch.has_seen(code) for code in codes):
            self._computed.append(captured.watch)
        if unwatched is not None:
            variant.doubt = unwatched
            remedy = _FEWER_GRAPHS if unwatched == _KEEPS_CHANGING else None
            self._warnings.doubtful(block, unwatched, remedy)
        if captured.recording.hides_compiled:
            self._warnings.compiled(block)
        for op in captured.recording.graph_ops:
            if op.refusal:
                self._warnings.never_recomputed(block, op.short_name, op.refusal)
        checkpoint = checkpoint_inside(captured.watch)
        if checkpoint is not None:
            self._warnings.checkpoints_inside(block, checkpoint)
        recording = captured.recording.doubted(variant.doubt)
        if earlier is not None and earlier.digest == recording.digest:
            variant.outliers = dict(earlier.outliers)
        return recording

    def _kept_result(self, block: Block, variant: Variant, watch: Watch) -> str | None:
        """A function of whose results the block has used one that was computed when no block was being recorded.

        If another block was, this one depends on all that the other has read.
        """
        for name, code in kept_results(variant.guards or {}).items():
            if not watch.has_seen(code):
                other = next((each for each in self._computed if each.has_seen(code)), None)
                if other is None:
                    return f"{name} (functools.lru_cache: nothing tells of what they were computed)"
                block.places.update(other.reads.places)
                variant.guards = {**marks_of(other.reads.places), **(variant.guards or {})}
        return None

    def _known_type(self, incoming: Incoming, captured: Capture, variant: Variant) -> KnownType:
        """The block type of a variant, measured if it is new."""
        block, signature, recording = incoming.block, incoming.signature, variant.recording
        agreement, digest = self._controller.agreement, recording.digest
        symbolic_types, sizes = self._controller.new_sizes.symbolic_types, signature.sizes
        relative, _ = block.relative(signature, variant.guards)  # at other input sizes
        # Constants that are computed from the sizes make it another program at each size.
        is_like = relative is not None and relative.recording.constants == recording.constants
        like = relative.digest if is_like else None
        if digest not in agreement.known_types:
            self._controller.step.close()  # measuring operators would be counted as the step's own
            profile = symbolic_types.profile(like, sizes, recording) or self._profiler.profile(recording, captured)
            known = agreement.add(digest, recording, profile)
            symbolic_types.learn(digest, like, sizes, recording, profile)
            if like is not None and symbolic_types.of(like) is symbolic_types.of(digest):
                self._controller.new_sizes.adopt(known, like)
            reason = self._controller.trials.admit(known, recording, captured)
            if reason is not None:
                self._warnings.unmeasurable(known.recording.name, reason)
        if is_like:
            symbolic_types.confirm(digest, recording.constants)
        known = agreement.known_types[digest]
        if block.latest(signature) is None:  # later, one batch with an Inf would forbid codecs for the rest of the run
            known.narrow([self._codecs.on_offer(value, recording) for value in recording.values])
        return known

    def _rank_outliers(self, variant: Variant, known: KnownType, tensors: RecordedTensors, anew: bool) -> None:
        """Find the outlier channels in the data. Channels that the variant has already stay, unless `anew` is true."""
        for index in known.outlier_values:
            if index in variant.outliers and not anew:
                variant.outliers[index] = tuple(each.to(tensors[index].device) for each in variant.outliers[index])
                continue
            variant.note_outliers(index, *self._codecs.outliers(tensors[index], known.recording.values[index]))
            if known.agreed is None:
                known.note_outliers(index, int(variant.outliers[index][1]))
