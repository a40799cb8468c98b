"""Blocks met, recorded, planned for and executed without an engine: what users do to a block between two calls."""

import functools
import logging

import pytest
import torch
import zoo
from torch import nn

from ds_adacc.config import load
from ds_adacc.runtime.runtime import Runtime

LOSSLESS = {"memory_budget": 0.8, "codecs": "none", "solver": {"max_seconds": 30.0}}


def runtime(**section):
    return Runtime(load({"adacc": LOSSLESS | section}))


def records_of(runtime):
    return [variant for block in runtime.blocks.all() for variant in block.variants()]


def stack(layers=3, make=zoo.GPTBlock):
    torch.manual_seed(1)
    return nn.ModuleList(make() for _ in range(layers))


def run_stack(blocks, x, call):
    torch.manual_seed(4)
    for block in blocks:
        x = call(block, x)
    return x


def compare(blocks, x, call):
    """Gradients under `call` have the bits of plain autograd's."""
    plain = zoo.gradients(blocks, (x,), {}, lambda x: run_stack(blocks, x, lambda block, x: block(x)))
    ours = zoo.gradients(blocks, (x,), {}, lambda x: run_stack(blocks, x, call))
    zoo.assert_same_bits(plain, ours)


def batch(size=2, time=9):
    return torch.randn(size, time, zoo.WIDTH, requires_grad=True)


def test_steps_before_and_after_planning_have_the_same_bits():
    work, blocks = runtime(), stack()
    for _ in range(4):
        compare(blocks, batch(), work.checkpoint)
    assert work.controller.plan is not None
    assert work.controller.plan.block_types[0].count == 3
    assert len(work.agreement.known_types) == 1


def test_a_sufficient_budget_installs_no_hooks():
    work, blocks = runtime(memory_budget=1.0), stack()
    seen = []
    blocks[0].register_forward_hook(lambda *_: seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True)))
    for _ in range(2):
        compare(blocks, batch(), work.checkpoint)
    seen.clear()
    compare(blocks, batch(), work.checkpoint)
    assert seen == [None, None]


def test_changing_shapes_get_records_of_their_own_and_are_bounded(monkeypatch):
    monkeypatch.setattr("ds_adacc.execute.block._VARIANTS", 16)
    monkeypatch.setattr("ds_adacc.steps.step_controller._MOST_ADOPTED", 16)
    work, blocks = runtime(), stack(2)
    for time in (9, 9, 5, 9, 5, 7, 9):
        compare(blocks, batch(time=time), work.checkpoint)
    assert len(records_of(work)) == 2 * 3
    for time in range(10, 30):
        compare(blocks, batch(time=time), work.checkpoint)
    assert len(records_of(work)) == 2 * 16
    assert len(work.agreement.known_types) <= 16 + 4  # the recorded ones stay


def test_a_number_on_a_schedule_is_never_replayed_stale():
    work, blocks = runtime(), stack(4, zoo.EagerBlock)
    recorded = []
    for step in range(8):
        for block in blocks:
            block.temperature = 1.0 + 0.3 * step
        compare(blocks, batch(), work.checkpoint)
        recorded.append(work.recordings)
    assert recorded[-1] == recorded[3], "settled after a few values: not recorded anew at every step"


def test_a_flag_that_toggles_keeps_one_record_for_each_side():
    class Flagged(zoo.GPTBlock):
        wide = True

        def forward(self, x):
            return super().forward(x if self.wide else x * 2.0)

    work, block = runtime(), Flagged()
    x = batch()
    for step in range(6):
        block.wide = step % 2 == 0
        zoo.assert_exact(block, (x,), {}, functools.partial(work.checkpoint, block))
    assert work.recordings == 2


def test_arguments_are_part_of_the_signature():
    block, (x, other), _ = zoo.example("many")
    work = runtime(memory_budget=0.9)
    cases = ({"flag": True}, {"flag": False}, {"flag": True, "factor": 3.0}, {"flag": True, "extra": torch.ones(1)})
    for kwargs in cases:
        for _ in range(3):
            zoo.assert_exact(block, (x, other), kwargs, functools.partial(work.checkpoint, block))
    assert work.recordings == 4


def test_outputs_come_back_as_the_block_gave_them():
    block, args, kwargs = zoo.example("many")
    work = runtime()
    for _ in range(3):
        tensor, mapping, detached = work.checkpoint(block, *args, **kwargs)
        assert mapping["none"] is None and mapping["number"] == 7
        assert tensor.requires_grad and not detached.requires_grad


def test_megatron_style_closures_made_anew_at_every_forward():
    work, blocks = runtime(memory_budget=0.9), stack(4)
    mask = torch.rand(2, 9, 1)

    def custom(start, end):
        def forward(x):
            for block in blocks[start:end]:
                x = block(x) * mask
            return x

        return forward

    def whole(x, call):
        torch.manual_seed(4)
        for start in (0, 2):
            x = call(custom(start, start + 2), x)
        return x

    x = batch()
    for _ in range(4):
        mask = torch.rand(2, 9, 1)
        plain = zoo.gradients(blocks, (x,), {}, lambda x: whole(x, lambda f, x: f(x)))
        zoo.assert_same_bits(plain, zoo.gradients(blocks, (x,), {}, lambda x: whole(x, work.checkpoint)))
    assert work.recordings == 2
    assert len(work.agreement.known_types) == 1


def test_methods_partials_and_lambdas_are_blocks_too():
    work, block = runtime(), stack(1)[0]
    x = batch()
    plain = zoo.gradients(block, (x,), {})
    for function in (block.forward, functools.partial(block), lambda x: block(x)):
        for _ in range(3):
            zoo.assert_same_bits(plain, zoo.gradients(block, (x,), {}, functools.partial(work.checkpoint, function)))
    assert work.recordings == 3


def test_eval_and_no_grad_are_left_alone():
    work, block = runtime(), stack(1)[0]
    with torch.no_grad():
        work.checkpoint(block, batch())
    assert work.recordings == 0
    block.eval()
    x = batch()
    for _ in range(3):
        zoo.assert_exact(block, (x,), {}, functools.partial(work.checkpoint, block))
    block.train()
    for _ in range(3):
        zoo.assert_exact(block, (x,), {}, functools.partial(work.checkpoint, block))
    assert work.recordings == 2


def test_gradient_accumulation():
    work, blocks = runtime(), stack()
    for _ in range(3):
        sums = []
        for call in (lambda b, x: b(x), work.checkpoint):
            blocks.zero_grad()
            for micro in range(3):
                torch.manual_seed(micro)
                zoo.loss_of(run_stack(blocks, batch(), call)).backward()
            sums.append([p.grad.clone() for p in blocks.parameters()])
        zoo.assert_same(*sums)


def test_several_forwards_before_their_backwards():
    work, blocks = runtime(), stack()
    x = batch()
    for _ in range(3):
        both = []
        for call in (lambda b, x: b(x), work.checkpoint):
            blocks.zero_grad()
            losses = [zoo.loss_of(run_stack(blocks, x * factor, call)) for factor in (1.0, 2.0)]
            for loss in losses:
                loss.backward()
            both.append([p.grad.clone() for p in blocks.parameters()])
        zoo.assert_same(*both)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x):
        return self.fc(torch.sparse.mm(torch.eye(9).to_sparse(), x[0]))[None]


def test_what_cannot_be_recorded_runs_plain_with_one_warning(caplog):
    work, block = runtime(), Sparse()
    x = batch(1)
    with caplog.at_level(logging.WARNING, logger="ds_adacc"):
        for _ in range(3):
            zoo.assert_exact(block, (x,), {}, functools.partial(work.checkpoint, block))
    warnings = [line for line in caplog.messages if "plain autograd" in line]
    assert len(warnings) == 1
    assert "Sparse" in warnings[0] and "layout torch.sparse" in warnings[0]


def test_an_exception_in_the_block_passes_through_and_leaves_nothing():
    work, block = runtime(), stack(1)[0]
    x = batch()
    for bad in range(3):
        with pytest.raises(RuntimeError):
            work.checkpoint(block, torch.randn(2, 9, zoo.WIDTH + 1 + bad))
        zoo.assert_exact(block, (x,), {}, functools.partial(work.checkpoint, block))


def test_nested_checkpoints_are_one():
    work, block = runtime(), stack(1)[0]
    x = batch()

    def outer(x):
        return work.checkpoint(block, x) * 2

    for _ in range(3):
        plain = zoo.gradients(block, (x,), {}, lambda x: block(x) * 2)
        zoo.assert_same_bits(plain, zoo.gradients(block, (x,), {}, functools.partial(work.checkpoint, outer)))


@pytest.mark.parametrize(
    ("codecs", "advice"),
    [("quantization", 'use "auto"'), ("paper-no-outliers", 'use "auto", or set "max_gradient_error"')],
)
def test_a_preset_without_a_bound_is_warned_of_with_what_it_allows(codecs, advice, caplog):
    Runtime(load({"adacc": {"codecs": codecs}}))
    assert [record.getMessage().partition("For training, ")[2] for record in caplog.records] == [advice]
