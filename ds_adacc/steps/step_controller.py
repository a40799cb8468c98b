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

Only `decide` changes the plan; steps 3 to 5 call it. `restore` takes the plan from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from ds_adacc.execute.block import Block
from ds_adacc.execute.block_registry import BlockRegistry
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.execute.variant import Variant
from ds_adacc.observe.calibration import Calibration, Observation
from ds_adacc.observe.rectifier import Review
from ds_adacc.plan.coordinator import Coordinator
from ds_adacc.plan.correction import Correction
from ds_adacc.plan.live_sets import LiveSet
from ds_adacc.plan.peak_estimate import largest_pass
from ds_adacc.plan.plan import Plan
from ds_adacc.plan.ranks import Ballot
from ds_adacc.plan.repeated_collectives import Repeatable
from ds_adacc.plan.solve import Forgiven
from ds_adacc.program.recording import Recording
from ds_adacc.program.signature import is_in_backward
from ds_adacc.report.journal import Journal
from ds_adacc.report.plan_log import PlanLog
from ds_adacc.sizes.new_sizes import NewSizes
from ds_adacc.steps.after_step import conclude_observation, conclude_trials, rectify
from ds_adacc.steps.binder import Binder
from ds_adacc.steps.pending_live_sets import PendingLiveSets
from ds_adacc.steps.policy_chooser import PolicyChooser
from ds_adacc.steps.saved_state import State
from ds_adacc.steps.step import Step
from ds_adacc.steps.step_schedule import Purpose
from ds_adacc.steps.trials import Trials

_MOST_ADOPTED = 64  # block types at predicted input sizes that are kept


class StepController:
    """Owns the current step and the schedule of the next ones, and decides when a plan changes.

    `has_engine`: an engine calls `end_step` at its steps, and plans change only then. Without one, a forward that
    follows a backward begins a new step; this must happen on all `ranks` at the same time.
    `plan`: the plan in force. `observation`: of the first step under it; None before that step has ended.
    `has_run_a_plan`: a step has run the policies of any plan, without trials; the same on all ranks.
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
        self.plan_log = PlanLog(self.agreement, journal, self.ranks)
        self._coordinator = coordinator
        self._binder = binder
        self.blocks = BlockRegistry()
        self._begin(State())

    def _begin(self, state: State) -> None:
        """Begin a run, or continue one from a saved state."""
        self.blocks.restore(state.blocks)
        indices = (saved["indices"] for saved in state.blocks)
        self.agreement.restore(state.agreement, dict(zip(self.blocks.every(), indices, strict=True)))
        self.new_sizes = NewSizes(self.agreement, self.blocks)
        self._chooser = PolicyChooser(self.blocks, self.agreement, self._binder)
        self.calibration = Calibration(self.agreement.log, state.corrected)
        self.plan: Plan | None = state.plan
        self.observation: Observation | None = state.observation
        self.review: Review | None = None
        self.has_run_a_plan = state.has_run_a_plan
        self.schedule = state.schedule
        if self.tracks:
            self.schedule = self.schedule.no_longer_than(self.agreement.config.rectifier.max_interval)
        self.pending = PendingLiveSets(self.agreement, self.new_sizes.adopter)
        self.trials = Trials(self.agreement, self._binder, self.pending, self.tracks, state.errors)
        self._ballot = Ballot(self.ranks)  # on whether something waits for a plan
        self.plan_log.resume(state.plan)
        self.step = self._next_step()

    @property
    def device(self) -> torch.device | None:
        """The device on which the blocks run; None before any has run."""
        return self._binder.device

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
        """Note a call of this program. What an earlier call holds of its inputs, that call only retains."""
        digest = recording.digest
        has_policy = self.agreement.note_use(digest)
        self.new_sizes.symbolic_types.note_use(digest)
        self.step.note_call(digest, block, has_policy)
        saved = {place: inputs[place] for place in recording.saved_inputs}
        for owner, place in self.step.current_pass.given.add(digest, saved):
            known = self.agreement.known_types.get(owner)
            if known is not None:  # a size that was forgotten in this forward
                known.only_retain(place)

    def note_second_forward(self, digest: str, seconds: float) -> None:
        """Note how long a second forward has taken. If the plan did not know it, the step's end plans again."""
        if self.agreement.note_second_forward(digest, seconds):
            self.pending.note_late(self.agreement.origin(digest), "second forwards were timed after the plan")

    def held_before(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The places of those inputs of a call that an earlier call of this forward holds.

        No places if block inputs are partitioned or held on the host: then each call makes a copy of its own.
        """
        return self.step.current_pass.given.held(inputs) if self.agreement.inputs == InputPlacement() else ()

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
            self.pending.note_kept_graph(ran)
        if self.pending.note(ran, self.step.is_fully_observed):
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
        self.step = self.step.restarted(self.device)

    # -- when a step ends

    def end_step(self) -> None:
        """End the step, and begin the next one, whose plan may be another one (Rule T1). Every rank must call.

        Raises what planning raises; the next step begins in that case too.
        """
        # The numbers are those at the head of this file. 1. The last pass has ended.
        self._end_pass_if_over()
        self.end_backward()
        # 2. What was observed of the plan in force?
        self.schedule = self.schedule.with_step_ended()
        self.review = None
        try:
            self.plan_log.end_step(self.observation, self.schedule.ended)
            conclude_observation(self)
            # 3. What waits for a plan?
            self.pending.end_step()
            if self._ballot.ask(self.pending.is_due, self.step.is_quiet):
                self.plan_pending()
            self.pending.forget_corrections()
            # 4. and 5. What do trials, or outliers, tell of the plan?
            if self.step.purpose is Purpose.TRY:
                conclude_trials(self)
            if self.step.is_tracking:
                self.review = rectify(self)
        finally:  # 6. The next step begins.
            ended = self.step
            ended.close()
            self.step = self._next_step()
            if self.step.recomputes:
                tell = self.plan_log.tracks if self.step.is_tracking else self.plan_log.tries
                tell(self.schedule.ended + 1)
            # In a step that recomputes, blocks do not run their policies. A tracking step has looked for outliers anew.
            if ended.recomputes or ended.is_tracking or self.step.recomputes:
                self.choose_policies(self.agreement.known_types)

    def _next_step(self) -> Step:
        purpose = Purpose.OBSERVE if self.plan is None else self.schedule.next_purpose(self.tracks)
        # All ranks communicate at the end of a step for which anything is due. So what this rank alone has not observed
        # must not decide whether the next step is one: it is observed only where nothing is due.
        is_quiet = purpose is Purpose.RUN
        if is_quiet:
            is_unsettled = self.observation is None or bool(self.pending) or self.pending.wants_observation
            if not self.has_engine:  # without an engine, only a step that is observed has an end
                is_unsettled |= bool(self.agreement.undecided) or self.schedule.try_from is not None
            purpose = Purpose.OBSERVE if is_unsettled else Purpose.RUN
        recomputes = purpose is Purpose.TRY or (purpose is Purpose.TRACK and self.agreement.has_lossy)
        return Step(purpose, self.device, recomputes, is_quiet)

    def plan_pending(self) -> None:
        """Plan for the live sets that wait for a plan. The first plan must fit the budget.

        A live set whose programs are planned for at another size adopts policies from that plan. If none fit, it waits.
        """
        is_first = self.plan is None
        live_sets, reason, corrections = self.pending.take()
        if is_first:
            reason = "first step recorded"
        elif self.agreement.undecided:
            reason = "new shapes or programs recorded"
        largest, others = self.new_sizes.adopter.largest(live_sets)
        self.decide(largest, reason, Forgiven.OUT_OF_TIME if is_first else Forgiven.ALL, corrections=corrections)
        # The plan has made some sizes be forgotten that had adopted policies. They adopt anew when they come again.
        known = [names for names in others if names <= self.agreement.known_types.keys()]
        adopter, passes = self.new_sizes.adopter, (largest_pass(self.agreement, names) for names in known)
        self.pending.add((frozenset(alive) for alive in passes if not adopter.adopt_for_pass(alive)), reason)
        self.choose_policies({name for names in known for name in names})

    def decide(
        self,
        live_sets: Collection[LiveSet],
        reason: str,
        forgiven: Forgiven = Forgiven.NONE,
        capacity: Mapping[str, Mapping[int, int]] | None = None,
        corrections: Mapping[str, Correction] | None = None,
    ) -> Plan:
        """Agree with the other ranks on policies for these live sets, and put them in force on this rank.

        Raises errors of the solver that are not `forgiven`.
        """
        for forward_pass in self.step.passes.values():
            self.agreement.arrange(forward_pass)
        self.step.passes = {}
        repeatable = Repeatable.of(self.blocks.all(), self.agreement.forward_order.names)
        plan = self._coordinator.decide(live_sets, self.device, reason, forgiven, capacity, corrections, repeatable)
        self.plan, self.observation = plan, None
        self.pending.forget_planned()
        self.schedule = self.schedule.with_new_plan(self.agreement.has_trials(plan))
        adopted = self.new_sizes.adopter.adopt_from_plan(plan)
        self.pending.forget(self.new_sizes.forget_adopted(all_but={*plan.policies, *adopted}))
        together = {name: k for name, k in self.agreement.known_types.items() if k.recording.repeats_collectives}
        for name, known in together.items():  # at other sizes too, they run what all ranks have agreed on now
            self.new_sizes.adopter.adopt_for_type(known, name)
        self.choose_policies([*plan.policies, *adopted, *together])
        self.new_sizes.forget_unused()
        self.plan_log.decided(plan, self.schedule.ended)
        return plan

    def limit_adopted(self) -> None:
        """Forget the block types at predicted input sizes that were used longest ago, if there are many.

        What a step observes is priced at its end, and so is what waits for a plan. What the current forward runs is
        priced at the end of its backward. So these must be known until then.
        """
        if self.step.observer is None:
            needed = {*self.step.current_pass.called, *self.pending.names}
            self.pending.forget(self.new_sizes.forget_adopted(needed, _MOST_ADOPTED))

    def choose_policy(self, block: Block, variant: Variant) -> None:
        """Choose what a new variant runs, as this step needs it."""
        self._chooser.choose_policy(block, variant, self.step)

    def choose_policies(self, digests: Iterable[str]) -> None:
        """Choose anew what the variants of these block types run, by the policies in force, for this step."""
        self._chooser.choose_policies(digests, self.step)

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
            self.pending.add_all("block inputs are held in another way")
            self.step.close()
            self.step = Step(Purpose.OBSERVE)  # the same on every rank, as all ranks call this

    # -- checkpoints

    def state_is_saved(self) -> None:
        """Prepare for saving the state, between two steps. If the next step would measure, that is postponed."""
        schedule = self.schedule.with_state_saved()
        if schedule != self.schedule:
            self.schedule = schedule
            self.step.close()
            self.step = self._next_step()

    def restore(self, state: State) -> None:
        """Continue from a saved state."""
        self.step.close()
        self._begin(state)
