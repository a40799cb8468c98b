"""A block type is planned for as one whose graph is kept from then on: at other sizes, and in a run that is resumed."""

import torch
import zoo
from any_size import Training


class Kept(Training):
    """Each backward keeps its graph."""

    def step(self, time):
        x = torch.randn(2, time, zoo.WIDTH, requires_grad=True)
        for block in self.blocks:
            x = self.runtime.checkpoint(block, x, rope=zoo.rope(time))
        x.sum().backward(retain_graph=True)
        self.runtime.controller.end_backward()
        del x
        self.adacc.end_step()

    @property
    def are_kept(self):
        """For each block type with policies, whether these count with that."""
        return {name: not each.spec.profile.graph.frees_stored for name, each in self.agreement.type_plans.items()}


def test_it_is_at_sizes_that_adopt_policies():
    training = Kept()
    for time in (16, 12, 10):
        training.step(time)
    plan = training.runtime.controller.plan
    for time in (14, 13, 11):
        training.step(time)
        assert training.runtime.controller.plan is plan
    assert len(training.agreement.adopted_types) == 5
    assert set(training.are_kept.values()) == {True}


def test_it_is_in_a_run_that_is_resumed():
    before, resumed = Kept(), Kept()
    for _ in range(3):
        before.step(12)
    resumed.runtime.restore(before.runtime.state())
    plan = resumed.runtime.controller.plan
    for _ in range(3):
        resumed.step(12)
    assert resumed.runtime.controller.plan is plan
    controller, agreement = resumed.runtime.controller, resumed.agreement
    controller.planning.decide(controller.step, agreement.live_sets, "once more")
    assert controller.plan is not plan
    assert list(before.are_kept.values()) == list(resumed.are_kept.values()) == [True]
