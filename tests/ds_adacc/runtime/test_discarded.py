"""Blocks that discard an output: what autograd saved for it dies with the block's call, so nothing of it is planned."""

import gc

import torch
import torch.nn.functional as F
import zoo
from any_size import Training
from recorded import call_of, record
from storages import Storages
from torch import nn

from ds_adacc.planner import HOPELESS
from ds_adacc.profile.arrival import Entrance
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.profile.probe import Probe
from ds_adacc.program.slots import keep, unpack
from ds_adacc.record.capture import capture

LENGTHS = (9, 12, 9, 15, 9, 18, 12, 33, 9, 21)


def test_planned_bytes_are_those_that_calls_hold():
    training = Training(zoo.IndexedBlock)
    seen = []
    for length in LENGTHS:
        training.compare(length)
        if (observation := training.runtime.controller.observation) is not None and observation.held is not None:
            seen.append(observation.held)
    assert seen and all(held.observed == held.planned for held in seen)
    for _, variant in training.runtime.blocks.variants():
        saved = {variant.recording.values[index].label for index in variant.recording.saved}
        assert saved >= {"norm out", "softmax"} and not saved & {"query out", "key out", "relu", "exp", "topk indices"}


def test_their_gradient_error_is_measured():
    training = Training(zoo.IndexedBlock, codecs="auto", memory_budget=0.7, max_gradient_error=0.2)
    for _ in range(6):
        training.step(33)
    (known,) = training.agreement.known_types.values()
    assert known.errors_are_measured
    errors = [error for *_, error in known.errors.coarsest.values()]
    assert errors and max(errors) < HOPELESS


def test_calls_are_held_until_their_backward_though_their_first_saved_tensors_are_discarded():
    training = Training(zoo.IndexedBlock)
    while training.runtime.controller.step.observer is not None or len(training.purposes) < 4:
        training.compare(9)
    x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    for block in training.blocks:
        x = training.runtime.checkpoint(block, x)
    assert not training.runtime.controller.step.is_pass_over
    x.sum().backward()
    assert training.runtime.controller.step.is_pass_over
    assert training.runtime.controller.step.current_pass.has_backward


class Branching(zoo.IndexedBlock):
    """Data decide whether it keeps what it has computed first."""

    def forward(self, x):
        first = self.query(x).exp().tanh()
        return super().forward(x) + (0.0 if bool(x[0, 0, 0] < 99) else first)


def test_where_data_decide_everything_counts_as_kept(caplog):
    training = Training(Branching, memory_budget=0.9)
    for length in (9, 9, 9, 12, 9):
        training.compare(length)
    assert "differs from the recorded" not in caplog.text
    recordings = [variant.recording for _, variant in training.runtime.blocks.variants()]
    assert recordings and not any(position.discarded for recording in recordings for position in recording.positions)


class Scoring(nn.Module):
    """Picks a token by scores that go through many operators, which save much for an output that is discarded."""

    def __init__(self):
        super().__init__()
        self.norm, self.query, self.key = nn.LayerNorm(zoo.WIDTH), *(nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(zoo.WIDTH, 4 * zoo.WIDTH), nn.Linear(4 * zoo.WIDTH, zoo.WIDTH)

    def best(self, h):
        scores = self.query(h) @ self.key(h).transpose(-1, -2)
        for _ in range(6):
            scores = scores.tanh()
        return scores.argmax(-1)

    def forward(self, x):
        h = self.norm(x)
        chosen = torch.gather(h, 1, self.best(h)[..., None].expand_as(h))
        return x + self.down(F.gelu(self.up(chosen)))


def test_what_is_discarded_is_alive_until_then():
    recording = record(Scoring(), (torch.randn(2, 40, zoo.WIDTH, requires_grad=True),), {})
    graph, names = block_graph(recording), [op.short_name for op in recording.ops]
    last = {graph.forward_lives[value.index][1] for value in recording.values if value.label.startswith("tanh")}
    assert last == {names.index("argmax")}
    assert names.index("argmax") < names.index("gather")


def test_the_peak_of_forward_keeps_the_budget_at_sizes_that_were_not_measured():
    training = Training(Scoring, memory_budget=2 << 20)
    for length in (32, 32, 48, 32, 64, 64, 32):
        training.compare(length)
    for length in (160, 160):
        x = torch.randn(2, length, zoo.WIDTH, requires_grad=True)
        with Storages() as storages:
            h = x * 1.0
            for block in training.blocks:
                h = training.runtime.checkpoint(block, h)
            h.sum().backward()
        training.adacc.end_step()
        assert storages.peak <= training.runtime.controller.plan.budget == 2 << 20


def alive_after(call):
    """Bytes alive after a call of a new block, beside its output."""
    torch.manual_seed(0)
    block, x = Scoring(), torch.randn(2, 40, zoo.WIDTH, requires_grad=True)
    gc.collect()
    with Storages() as storages:
        result = call(block, x)
    assert result is not None
    return storages.alive()


def test_a_call_that_is_recorded_or_probed_holds_nothing_of_what_is_discarded():
    of_scores = 2 * 40 * 40 * 4
    plain = alive_after(lambda block, x: block(x))
    assert alive_after(lambda block, x: capture("block", call_of(block, x))) < plain + of_scores
    recording = record(Scoring(), (torch.randn(2, 40, zoo.WIDTH, requires_grad=True),), {})

    def probed(block, x):
        probe = Probe(recording, [x], lambda *_: None, Entrance())
        with torch.autograd.graph.saved_tensors_hooks(probe.pack(keep), unpack):
            return probe.watch(block(x))

    assert alive_after(probed) < plain + of_scores


class Returning(Scoring):
    def forward(self, x):
        h = self.norm(x)
        return self.query(h).tanh(), self.down(F.gelu(self.up(h)))


class Discarding(Returning):
    def forward(self, x):
        return super().forward(x)[1:]


def test_blocks_of_which_one_discards_what_the_other_returns_are_of_two_types():
    x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
    returning, discarding = (record(make(), (x,), {}) for make in (Returning, Discarding))
    assert [op.name for op in returning.ops] == [op.name for op in discarding.ops]
    assert returning.digest != discarding.digest
