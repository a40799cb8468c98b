"""What happens between steps: compare predictions with observations, and make policies for new blocks.

After the engine's own step (`engine/engine_methods.py`), and once any rank has called a block (`engine/adacc.py`), in
this order (`StepController.end_step`):

1. The last forward and backward have ended. Their block types were alive together; they are one live set.
2. The step is counted. After the first step under a plan, the plan is compared with what was observed, and the table is
   printed. If the memory model was wrong, it is corrected, and a new plan is due.
3. All ranks together plan for the live sets that have no plan. After a step in which nothing was due on any rank, no
   rank waits for another one: they only begin to ask each other, and take the answer at the end of the next step.
4. After a step of trials, policies that keep the bound on the gradient error come into force. A new plan is made for
   blocks whose policies do not.
5. After a tracking step the rectifier judges the outliers, and the gradient errors of the policies that were in force
   before it. If the outliers have drifted, or an error is above the bound, a new plan is made.
6. Whether or not planning has failed, the next step begins, with its purpose (`StepSchedule.next_purpose`). Events for
   DeepSpeed's monitors follow.

Only `Planning.decide` changes the plan; steps 3 to 5 call it. `restore` takes the plan from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ds_adacc.execute.block import Block
from ds_adacc.execute.block_registry import BlockRegistry
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.execute.variant import Variant
from ds_adacc.observe.calibration import Observation
from ds_adacc.observe.rectifier import Review
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.plan import Plan
from ds_adacc.plan.ranks import Ballot
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import is_in_backward
from ds_adacc.report.journal import Journal
from ds_adacc.report.plan_log import PlanLog
from ds_adacc.steps.after_step import conclude_observation, conclude_trials, rectify
from ds_adacc.steps.binder import Binder
from ds_adacc.steps.planning import Planning
from ds_adacc.steps.saved_state import State
from ds_adacc.steps.step import Step
from ds_adacc.steps.step_schedule import Purpose

_MOST_ADOPTED = 64  # block types at predicted input sizes that are kept


class StepController:
    """Owns the current step, divides it into passes, and has the plan changed when it has ended.

    `has_engine`: an engine calls `end_step` at its steps, and plans change only then. Without one, a forward that
    follows a backward begins a new step; this must happen on all `ranks` at the same time.
    `tracks`: there are tracking steps. `review`: the rectifier's result for the step that has just ended; None if that
    was not a tracking step.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        binder: Binder,
        journal: Journal,
        has_engine: bool,
    ) -> None:
        self.agreement = coordinator.agreement
        self.journal = journal
        self.ranks = coordinator.ranks
        self.has_engine = has_engine
        self.tracks = has_engine and self.agreement.config.rectifier.enabled
        self._plan_log = PlanLog(self.agreement, journal, self.ranks)
        self._coordinator = coordinator
        self._binder = binder
        self.blocks = BlockRegistry()
        self._begin(State())

    def _begin(self, state: State) -> None:
        """Begin a run, or continue one from a saved state."""
        self.blocks.restore(state.blocks)
        indices = (saved["indices"] for saved in state.blocks)
        self.agreement.restore(state.agreement, dict(zip(self.blocks.every(), indices, strict=True)))
        self.planning = Planning(
            self._coordinator,
            self._binder,
            blocks=self.blocks,
            journal=self.journal,
            plan_log=self._plan_log,
            tracks=self.tracks,
            state=state,
        )
        self.review: Review | None = None
        self._ballot = Ballot(self.ranks)  # on whether something waits for a plan
        self._plan_log.resume(state.plan)
        self.step = self._next_step()

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self.planning.plan

    @property
    def observation(self) -> Observation | None:
        """What was observed in the first step under the plan in force; None before that step has ended."""
        return self.planning.observation

    # -- while a step runs

    def begin_call(self) -> None:
        """Prepare for a call of a block. Without an engine, a forward that follows a backward begins a new step."""
        self.end_pending_pass()
        self._end_pass_if_over()
        if self.has_engine or not self.step.was_observed:
            return
        if self.step.is_partly_observed:
            # Calls before the new block were not counted: observe a whole step.
            self.step = Step(Purpose.OBSERVE, is_quiet=self.step.is_quiet)
        else:
            self.end_step()

    def _end_pass_if_over(self) -> None:
        """End the current pass if autograd holds nothing of it any more, which nobody has told.

        Its backward may be one that the engine does not run, such as `torch.autograd.grad`. If it had none, as an
        evaluation with gradients has none, it is discarded: its calls hold no memory beside the next ones.
        """
        if not self.step.is_pass_over:
            return
        if not self.step.current_pass.has_backward:
            self.step.drop_pass()
        elif self.has_engine:
            self.end_backward()
        elif not self.step.was_observed:  # without an engine, a new step begins after an observed backward
            self.step.drop_pass()

    def note_call(self, block: Block, recording: Recording, inputs: Sequence[torch.Tensor]) -> None:
        """Note a call of this program. What an earlier call holds of its inputs, that call retains for this one too."""
        digest = recording.digest
        has_policy = self.agreement.note_use(digest)
        self.planning.new_sizes.symbolic_types.note_use(digest)
        self.step.note_call(digest, block, has_policy)
        if not self._calls_share_inputs:
            return
        # Its type tells what it may hold: to find that anew for each block and size took up to half a millisecond.
        known_types, given = self.agreement.known_types, self.step.current_pass.given
        program = known_types[digest].recording
        asked = given.owners((inputs[place] for place in program.saved_and_held_before), block.class_name)
        held = {place: inputs[place] for place in program.held_inputs}
        for owner, place in given.add(digest, held, program.unsaved_inputs, block.class_name):
            if owner in known_types:  # a size that was forgotten in this forward
                known_types[owner].retain_for_others(place, (owner, place) in asked)

    def note_second_forward(self, digest: str, seconds: float) -> None:
        """Note how long a second forward has taken. If the plan did not know it, the step's end plans again."""
        if self.agreement.note_second_forward(digest, seconds):
            self.planning.pending.note_late(self.agreement.origin(digest), "second forwards were timed after the plan")

    def held_before(self, block: Block, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The places of those inputs of a call of the block that an earlier call of this forward holds."""
        return self.step.current_pass.given.held(inputs, block.class_name) if self._calls_share_inputs else ()

    @property
    def _calls_share_inputs(self) -> bool:
        """Whether calls hold the inputs that they are given. Partitioned, or on the host, each call holds a copy."""
        return self.agreement.inputs == InputPlacement()

    def end_backward(self) -> None:
        """Note the end of a forward and its backward. The block types that ran were alive together: a live set.

        At the end of `loss.backward()` autograd still runs, and no profiler can be stopped. So the end of the pass is
        pending, until `end_pending_pass`.
        """
        current = self.step.current_pass
        current.end_is_pending = is_in_backward()
        if current.end_is_pending:
            return
        ran = self.step.end_pass()
        if current.keeps_graph:
            self.planning.pending.note_kept_graph(ran)
        if self.planning.pending.note(ran, self.step.is_fully_observed):
            self.choose_policies(ran)

    def end_pending_pass(self) -> None:
        """End the pass if `end_backward` could not. Called before the next forward, and before the optimizer runs."""
        if self.step.current_pass.end_is_pending and not is_in_backward():
            self.end_backward()

    def note_update(self) -> None:
        """Note that the optimizer has changed the parameters."""
        self._binder.note_update()

    def abandon(self) -> None:
        """Stop observing the current forward: a backward has failed (Rule T6), or the runtime is no longer used."""
        self.step = self.step.restarted(self.planning.device)

    # -- when a step ends

    def end_step(self) -> None:
        """End the step, and begin the next one, whose plan may be another one (Rule T1). Every rank must call.

        Raises what planning raises; the next step begins in that case too.
        """
        # The numbers are those at the head of this file. 1. The last pass has ended.
        self._end_pass_if_over()
        self.end_backward()
        # 2. What was observed of the plan in force?
        self.planning.schedule = self.planning.schedule.with_step_ended()
        self.review = None
        try:
            self._plan_log.end_step(self.observation, self.planning.schedule.ended)
            conclude_observation(self.planning, self.step)
            # 3. What waits for a plan?
            self.planning.pending.end_step()
            if self._ballot.ask(self.planning.pending.is_due, self.step.is_quiet):
                self.planning.plan_pending(self.step)
            self.planning.pending.forget_corrections()
            # 4. and 5. What do trials, or outliers, tell of the plan?
            if self.step.purpose is Purpose.TRY:
                conclude_trials(self.planning, self.step)
            if self.step.is_tracking:
                self.review = rectify(self.planning, self.step)
        finally:  # 6. The next step begins.
            ended = self.step
            ended.close()
            self.step = self._next_step()
            if self.step.recomputes:
                log = self._plan_log.tracks if self.step.is_tracking else self._plan_log.tries
                log(self.planning.schedule.ended + 1)
            # In a step that recomputes, blocks do not run their policies. A tracking step has looked for outliers anew.
            if ended.recomputes or ended.is_tracking or self.step.recomputes:
                self.choose_policies(self.agreement.known_types)

    def _next_step(self) -> Step:
        purpose = Purpose.OBSERVE if self.plan is None else self.planning.schedule.next_purpose(self.tracks)
        # All ranks communicate at the end of a step for which anything is due. So what this rank alone has not observed
        # must not decide whether the next step is one: it is observed only where nothing is due.
        is_quiet = purpose is Purpose.RUN
        if is_quiet:
            pending = self.planning.pending
            is_unsettled = self.observation is None or bool(pending) or pending.wants_observation
            if not self.has_engine:  # without an engine, only a step that is observed has an end
                is_unsettled |= bool(self.agreement.undecided) or self.planning.schedule.try_from is not None
            purpose = Purpose.OBSERVE if is_unsettled else Purpose.RUN
        recomputes = purpose is Purpose.TRY or (purpose is Purpose.TRACK and self.agreement.has_lossy)
        return Step(purpose, self.planning.device, recomputes, is_quiet)

    def limit_adopted(self) -> None:
        """Forget the block types at predicted input sizes that were used longest ago, if there are many.

        What a step observes is priced at its end, and so is what waits for a plan. What the current forward runs is
        priced at the end of its backward. So these must be known until then.
        """
        if self.step.observer is None:
            needed = {*self.step.current_pass.called, *self.planning.pending.names}
            self.planning.pending.forget(self.planning.new_sizes.forget_adopted(needed, _MOST_ADOPTED))

    def choose_policy(self, block: Block, variant: Variant) -> None:
        """Choose what a new variant runs, as this step needs it."""
        self.planning.chooser.choose_policy(block, variant, self.step)

    def choose_policies(self, digests: Iterable[str]) -> None:
        """Choose anew what the variants of these block types run, by the policies in force, for this step."""
        self.planning.chooser.choose_policies(digests, self.step)

    # -- requests from other modules

    def hold_inputs(self, placement: InputPlacement) -> None:
        """Hold retained block inputs as `placement` says from the next call on. The next step's end plans for it.

        Every rank must call, between two steps.
        """
        if placement == self.agreement.inputs:
            return
        self.agreement.inputs = placement
        self.choose_policies(self.agreement.known_types)
        if self.plan is not None:
            self.planning.pending.add_all("block inputs are held in another way")
            self.step.close()
            self.step = Step(Purpose.OBSERVE)  # the same on every rank, as all ranks call this

    # -- checkpoints

    def state_is_saved(self) -> None:
        """Prepare for saving the state, between two steps. If the next step would measure, that is postponed."""
        schedule = self.planning.schedule.with_state_saved()
        if schedule != self.planning.schedule:
            self.planning.schedule = schedule
            self.step.close()
            self.step = self._next_step()

    def restore(self, state: State) -> None:
        """Continue from a saved state."""
        self.step.close()
        self._begin(state)
