"""Run the calls of blocks that have a policy: is each saved tensor to be packed, and by what."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ds_adacc.execute.block import Block
from ds_adacc.execute.bound_policy import BoundPolicy
from ds_adacc.execute.call import Call, PackedCall
from ds_adacc.execute.incoming import Incoming
from ds_adacc.execute.variant import Variant
from ds_adacc.observe.outlier_tracker import tracking_outliers
from ds_adacc.profile.codec_maker import CodecMaker
from ds_adacc.profile.probe import Probe
from ds_adacc.profile.timer import stopwatch
from ds_adacc.program.dispatch_modes import BesideCompiled
from ds_adacc.program.slots import on_one_stream, run_packed
from ds_adacc.record.follower import follow, not_followed_now
from ds_adacc.runtime.learner import Learned
from ds_adacc.runtime.plain_calls import PlainCalls
from ds_adacc.runtime.seen_programs import SeenPrograms
from ds_adacc.runtime.warnings import Warnings
from ds_adacc.steps.binder import Binder
from ds_adacc.steps.step_controller import StepController
from ds_adacc.whole_blocks.beginning import Beginning
from ds_adacc.whole_blocks.host_copies import HostCopies
from ds_adacc.whole_blocks.same_again import SameAgain
from ds_adacc.whole_blocks.whole_call import Around, WholeCall

Pack = Callable[[torch.Tensor], Any]


class _Second(NamedTuple):
    """A second forward: as of `WholeCall`. `end_forward` is to be told that the first one has ended."""

    beginning: Beginning
    around: Around
    end_forward: Callable[[], None]


class _Running(NamedTuple):
    """A call that has begun and has not ended. `pack`: its pack hook; `done`: what to call with its output.

    `probe`: None if nothing is measured in it. `second`: None unless a second forward makes all that this one saves.
    """

    call: PackedCall
    pack: Pack
    done: Callable[[Any], None]
    probe: Probe | None
    second: _Second | None


class PlannedCalls:
    """Runs calls under their variants' policies."""

    def __init__(
        self,
        controller: StepController,
        binder: Binder,
        codecs: CodecMaker,
        warnings: Warnings,
        plain: PlainCalls,
        inside: Around,
    ) -> None:
        """`inside`: what second forwards run in."""
        self._controller = controller
        self._inside = inside
        self._binder = binder
        self._codecs = codecs
        self._warnings = warnings
        self._plain = plain
        self._seen = SeenPrograms(controller)

    def run(self, incoming: Incoming, variant: Variant) -> Any:
        """Run the call, and pack what its forward saves."""
        if not variant.is_recorded:
            self._binder.pass_over()
            return self._plain.run(incoming.as_plain, is_of_call=True)
        block, bound = incoming.block, variant.bound
        if bound.prefetcher is None:
            self._binder.pass_over()
        self._controller.note_call(block, bound.recording, incoming.call.inputs)
        step = self._controller.step
        is_followed = self._is_to_follow(incoming, variant, bound)
        reason = not_followed_now(bound.recording) if is_followed else None
        # Where everything is retained and nobody looks on, no hooks are needed (Rule T4).
        is_watched = step.observer is not None or step.is_tracking or variant.trial is not None
        if reason is not None or (bound.is_trivial and not is_watched):
            alive = step.current_pass.begin_call(variant.digest)
            output = incoming.call.run() if reason is None else self._plain.run_on_this_rank(incoming.as_plain, reason)
            step.current_pass.note_plain(alive, output)
            if bound.recording.runs_compiled:
                block.note_known_graphs()
            return output
        return self._run_with_hooks(incoming, variant, bound, is_followed)

    def _run_with_hooks(self, incoming: Incoming, variant: Variant, bound: BoundPolicy, is_followed: bool) -> Any:
        tracks, second = self._controller.step.is_tracking, self._second(incoming, variant)
        # To follow a call takes ten times as long as its forward.
        running = self._begin(incoming, variant, second, tracks, times_forward=not is_followed)
        call, probe = running.call, running.probe
        pack = on_one_stream(running.pack if probe is None else probe.pack(running.pack))
        if bound.recording.runs_compiled or bound.recording.is_whole:  # data decide what runs of that
            pack = torch.compiler.disable(pack)  # at a graph break, dynamo would compile it
        try:
            if is_followed:
                output, is_as_predicted, reads = follow(bound.recording, incoming.call, pack, call.diverge)
                if reads is not None:
                    incoming.block.places.update(reads.places)  # at other sizes, other code may have run
                    if is_as_predicted:
                        variant.is_unseen = False
                        self._seen.add(incoming, variant)
            else:
                output = run_packed(pack, incoming.call.run)
            outdated = call.confirm(output)
            if outdated is not None:
                self._note_other_graphs(incoming.block, variant, outdated)
            elif bound.recording.runs_compiled:
                incoming.block.note_known_graphs()
            return self._finish(incoming, running, output)
        finally:
            call.close()

    def pack_recorded(self, incoming: Incoming, learned: Learned) -> Any:
        """Pack what the forward of a recorded call has saved, and return the output."""
        captured, variant = learned.captured, learned.variant
        assert variant is not None
        self._seen.add(incoming, variant)
        output, noted = captured.output, captured.noted
        known = incoming._replace(guards=variant.guards or incoming.guards)
        second = self._second(known, variant, learned.beginning)
        tracks = self._controller.step.is_tracking and not learned.outliers_are_new
        running = self._begin(incoming, variant, second, tracks, noted)
        call, probe = running.call, running.probe
        if probe is not None:
            probe.slots, probe.noted = captured.slots, noted
        try:
            captured.hand_over(running.pack)
            if not call.diverged:
                call.release()
            return self._finish(incoming, running, output)
        finally:
            call.close()

    def _finish(self, incoming: Incoming, running: _Running, output: Any) -> Any:
        """The forward of the call has ended. Returns what the block returns, through the `probe` if there is one.

        What is observed of its backward begins before the probe's own ones, which are not timed.
        """
        call, _, done, probe, second = running
        if second is not None:
            second.end_forward()
        if probe is not None and not call.diverged:  # else it would measure another program
            output = probe.watch(output)
        done(output)
        if isinstance(call, WholeCall) and call.bound.recording.repeats_collectives:
            call.run_at_gradient_of(output, incoming.call.given)
        if call.diverged:
            assert call.alive is not None  # `_begin` has counted it
            self._controller.step.current_pass.note_plain(call.alive, output)
        return output

    def _is_to_follow(self, incoming: Incoming, variant: Variant, bound: BoundPolicy) -> bool:
        """Whether the call replays operators of a predicted program, and it was not seen that the block runs it."""
        if variant.is_unseen and bound.segments and not bound.recording.is_whole:
            variant.is_unseen = not self._seen.has_seen(incoming, variant)
            return variant.is_unseen
        return False

    def _begin(
        self,
        incoming: Incoming,
        variant: Variant,
        second: _Second | None,
        tracks: bool,
        noted: Mapping[int, torch.Tensor] | None = None,
        times_forward: bool = False,
    ) -> _Running:
        """Begin a call.

        `tracks`: whether to look for outliers in what it saves. `noted`: the buffers and the states of random
        generators, if the tensors are packed only after the forward. `times_forward`: whether to time the forward. If a
        probe measures the call, neither its forward nor its backward is timed.
        """
        bound, step, inputs = variant.bound, self._controller.step, incoming.call.inputs
        probe = self._controller.planning.trials.probe(incoming.block, variant, inputs, step)
        observer, alive = step.observer, step.current_pass.begin_call(variant.digest)
        observed = None
        # The observer comes first: the call stores the block's inputs, and these bytes are the call's own.
        if observer is not None:
            is_plain = probe is None
            observed = observer.begin(variant, incoming.block, alive, times_forward and is_plain, is_plain)
            if observed.moments is not None:
                observed.moments.was_recorded = noted is not None
        on_divergence = functools.partial(self._warnings.diverged, incoming.block)
        if variant.is_predicted:
            on_divergence = functools.partial(self._doubt_prediction, incoming.block, variant)
        call: PackedCall
        if second is not None:
            call = WholeCall(bound, inputs, second.beginning, second.around, alive)
        else:
            call = Call(bound, inputs, on_divergence, noted, alive)
            call.diverged |= bound.recording.is_whole  # one operator does not tell what is saved: all is retained
        pack: Pack = call.pack
        if bound.recording.repeats_collectives and self._controller.agreement.known_types[variant.digest].plan is None:
            pack = HostCopies(call.pack).pack
        if tracks and isinstance(call, Call):
            agreement = self._controller.agreement
            values = agreement.known_types[variant.digest].tracked_values(agreement.config.rectifier.roles)
            pack = tracking_outliers(call, variant, self._codecs, values, inputs)
        if observer is None or observed is None:
            return _Running(call, pack, _nothing, probe, second)
        watched, done = observer.watch(observed, call, inputs, pack)
        return _Running(call, watched, done, probe, second)

    def _second(self, incoming: Incoming, variant: Variant, recorded: Beginning | None = None) -> _Second | None:
        """The second forward of a call; None if its policy does not recompute the block as a whole.

        `recorded`: the beginning of the call if it was recorded, and its forward has run. Its second forward is timed,
        and so are the first ones under a plan if the ranks had yet to agree on them.
        """
        if not (variant.recording.is_whole and variant.bound.segments):
            return None
        same = SameAgain(incoming, variant, self._inside, self._warnings.ran_twice)
        around: Around = same.around
        if recorded is not None:
            around = functools.partial(_as_recorded, around)
        if recorded is not None or not self._controller.agreement.known_types[variant.digest].is_timed:
            around = functools.partial(self._timed, variant.digest, around)
        return _Second(recorded or Beginning(incoming.call, variant.recording), around, same.end_forward)

    @contextmanager
    def _timed(self, digest: str, around: Around) -> Iterator[None]:
        """Note how long a second forward takes. It waits for the device, but in few calls: until one is timed."""
        with around(), stopwatch(self._binder.device, functools.partial(self._controller.note_second_forward, digest)):
            yield

    def _note_other_graphs(self, block: Block, variant: Variant, outdated: Collection[type]) -> None:
        """A call of the block has run other graphs than the recorded ones, or with other numbers."""
        if block.keeps_changing_graphs and variant.doubt:
            return  # nothing of it is replayed, whichever graphs run
        self._controller.step.current_pass.take_back(variant.digest, block)
        block.note_other_graphs({run.cls for run in variant.recording.graphs}, variant)
        for other in self._controller.blocks.all():  # blocks of one class run the same graphs
            if other is not block:
                other.note_other_graphs(outdated)
        self._warnings.compiled_anew(block)

    def _doubt_prediction(self, block: Block, variant: Variant, bound: BoundPolicy, position: int) -> None:
        """Have the next call of this size recorded: what it saves does not follow its input sizes as guessed."""
        self._controller.step.current_pass.take_back(variant.digest, block)
        block.note_mispredicted(variant)
        self._controller.planning.new_sizes.symbolic_types.note_mistake(variant.digest, variant.has_varied_numbers)
        self._warnings.mispredicted(block, bound, position)


@contextmanager
def _as_recorded(around: Around) -> Iterator[None]:
    """Run a second forward of a call that was recorded: some operators of torch run as others if a mode looks on."""
    with around(), BesideCompiled():
        yield


def _nothing(_: Any) -> None:
    pass
