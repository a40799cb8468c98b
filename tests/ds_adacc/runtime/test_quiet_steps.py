"""At the end of a step in which nothing is due, no rank waits for another: the ranks' vote is read a step later."""

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.plan.ranks import Ranks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.steps.step_schedule import Purpose


class TwoRanks(Ranks):
    """This rank and a second one that says no, unless `says_yes` at the next vote. `log` has what was asked when."""

    others = 1

    def __init__(self):
        super().__init__()
        self.log, self.says_yes = [], False

    @property
    def size(self):
        return 1 + self.others

    def any(self, flag):
        self.log.append("any")
        return flag

    def vote(self, flag):
        self.log.append("vote")
        passed, self.says_yes = flag or self.says_yes, False

        def result():
            self.log.append("result")
            return passed

        return result


@pytest.fixture
def training():
    return Training()


class Training:
    def __init__(self):
        section = {"memory_budget": "1GiB", "codecs": "none", "rectifier": {"max_interval": 64}}
        self.ranks = TwoRanks()
        self.runtime = Runtime(load({"adacc": section}), self.ranks, has_engine=True)
        self.block = zoo.Tiny()

    def step(self, *others):
        """Purpose of a step with a micro-batch for each block, and what the ranks were asked at its end."""
        controller = self.runtime.controller
        purpose = controller.step.purpose
        for block in (self.block, *others):
            self.runtime.checkpoint(block, torch.randn(2, 4, requires_grad=True)).sum().backward()
            controller.end_backward()
        self.ranks.log.clear()
        controller.end_step()
        return purpose, list(self.ranks.log)

    def until_quiet(self):
        """Until several quiet steps lie ahead."""
        controller = self.runtime.controller
        while controller.planning.schedule.interval < 8 or controller.step.purpose is not Purpose.RUN:
            self.step()


def test_ranks_wait_for_one_another_only_where_something_is_due(training):
    seen = [training.step() for _ in range(10)]
    for purpose, asked in seen:
        assert ("any" in asked) == (purpose is not Purpose.RUN)
        assert ("vote" in asked) == (purpose is Purpose.RUN)
    quiet = [asked for purpose, asked in seen if purpose is Purpose.RUN]
    assert len(quiet) >= 5
    assert ["result", "vote"] in quiet, "two in a row"


def test_what_is_new_on_this_rank_is_planned_for_a_step_later(training):
    training.until_quiet()
    controller = training.runtime.controller
    plan = controller.plan
    training.step(nn.Sequential(nn.Linear(4, 6), nn.GELU()))
    assert controller.planning.pending and controller.plan is plan
    training.step()
    assert not controller.planning.pending and controller.plan is not plan
    assert controller.step.purpose is Purpose.MEASURE


def test_what_is_new_on_another_rank_is_planned_for_too(training):
    training.until_quiet()
    controller, decided = training.runtime.controller, []
    controller.planning.plan_pending = lambda _: decided.append(controller.planning.schedule.ended)
    training.ranks.says_yes = True
    training.step()
    assert decided == []
    training.step()
    assert decided == [controller.planning.schedule.ended]


def test_one_rank_alone_never_votes():
    training = Training()
    training.ranks.others = 0
    training.until_quiet()
    assert training.step() == (Purpose.RUN, [])
    training.step(nn.Sequential(nn.Linear(4, 6), nn.GELU()))
    assert not training.runtime.controller.planning.pending, "planned for at once"
