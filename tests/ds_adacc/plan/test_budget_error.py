"""The error of a budget that no plan fits names the key, what to set, and what takes the memory."""

import contextlib
import pickle
import random
import re
import sys
import weakref

import pytest
import torch
import zoo
from stack import WIDTH, Model
from torch import nn

from ds_adacc import planner
from ds_adacc.config import load
from ds_adacc.engine.adacc import Adacc, _end_in_silence
from ds_adacc.plan.budget_error import BudgetTooSmall, fraction
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks


def refused(budget, dropout=0.1, layers=6, **section):
    section = {"codecs": "none", "memory_budget": budget, "solver": {"max_seconds": 30.0}} | section
    runtime = Runtime(load({"adacc": section}), has_engine=True)
    Model(lambda: zoo.GPTBlock(WIDTH, 4, dropout), layers).step(runtime.checkpoint)
    return Adacc(runtime)


def test_it_names_the_key_the_smallest_budget_and_the_largest_values():
    with pytest.raises(planner.InfeasibleBudget) as caught:
        refused("1KiB").end_step()
    error = caught.value
    text = str(error)
    first, told, batches, *_ = text.splitlines()
    assert first.startswith(
        "adacc.memory_budget = 1024 (1.00 KiB): this is too small for the blocks' activations, which"
    )
    assert "for the batches of this step" in batches
    least = planner.human_bytes(error.smallest)
    start = rf'  The smallest budget (that fits|found to fit) is {least}: "memory_budget": {error.smallest} or, as a '
    assert re.fullmatch(start + r'fraction of the peak without checkpointing, "memory_budget": 0\.\d+\.', told)
    held = text.partition("The largest tensors that even a lean plan holds, over all blocks: ")[2].split("; ")
    assert len(held) == 3
    assert any(name.startswith("dropout mask '") for name in held)
    assert all(re.search(r"' of GPTBlock, [\d.]+ .iB", name) for name in held)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.smallest, copy.budget) == (BudgetTooSmall, text, error.smallest, 1024)


@pytest.mark.parametrize(("bound", "is_tried"), [(0.1, True), (None, False)])
def test_it_promises_nothing_of_lossy_choices_that_are_not_tried_yet(bound, is_tried):
    with pytest.raises(BudgetTooSmall) as caught:
        refused("1KiB", codecs="auto", max_gradient_error=bound).end_step()
    told = str(caught.value).splitlines()[1]
    condition = ", if its lossy choices keep adacc.max_gradient_error when they are tried, is "
    assert (condition in told) == is_tried
    assert (" fits is " in told or " to fit is " in told) != is_tried


def test_it_tells_if_the_backward_of_one_block_takes_most_of_it():
    def text(layers):
        with pytest.raises(planner.InfeasibleBudget) as caught:
            refused("1KiB", layers=layers).end_step()
        return str(caught.value)

    assert re.search(r"About [\d.]+ .iB are taken only while the backward of a single block runs", text(2))
    assert "single block" not in text(30)


@pytest.mark.parametrize(("length", "cache_enabled"), [(8, True), (8, False), (256, True)])
def test_it_tells_what_autocast_keeps_if_forward_has_the_peak(length, cache_enabled):
    """Two blocks of 12 * 64 * 64 weights, and 9 * 64 numbers in biases. With long inputs, backward has the peak."""
    model = Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1), layers=2)
    model.leaf, model.weight = model.leaf.detach()[:1, :length].requires_grad_(), model.weight[:1, :length]
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": "1KiB"}}), has_engine=True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
        model.step(runtime.checkpoint)
    with pytest.raises(planner.InfeasibleBudget) as caught:
        Adacc(runtime).end_step()
    casts = "About 194.25 KiB of it are casts of weights that torch.autocast keeps until its context ends."
    assert (casts in str(caught.value)) == (cache_enabled and length == 8)


def test_blocks_of_single_operators_are_told_to_be_larger():
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": "1KiB"}}), has_engine=True)
    Model(lambda: nn.Linear(WIDTH, WIDTH)).step(runtime.checkpoint)
    with pytest.raises(BudgetTooSmall, match=r"No block runs more than 3 operators, .*: larger blocks") as caught:
        Adacc(runtime).end_step()
    assert "smaller blocks" not in str(caught.value)


class ReadsData(zoo.GPTBlock):
    def forward(self, x):
        return super().forward(x if x.sum().item() > 0 else x + 1)


def test_it_tells_why_no_more_is_recomputed():
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": "1KiB"}}), has_engine=True)
    Model(lambda: ReadsData(WIDTH, 4, 0.0)).step(runtime.checkpoint)
    with pytest.raises(BudgetTooSmall) as caught:
        Adacc(runtime).end_step()
    line = ReadsData.forward.__code__.co_firstlineno + 1
    why = f" Why no more of ReadsData is recomputed: test_budget_error.py:{line} (forward) reads data into Python"
    assert str(caught.value).count(why) == 1
    assert "pass it as an argument. To have the block recomputed as a whole, call it by" in str(caught.value)


def test_it_names_no_budget_above_the_peak_without_checkpointing():
    """The solver counts in larger units than bytes, and rounds up."""
    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": "1KiB"}}), has_engine=True)
    model = Model(lambda: ReadsData(WIDTH, 4, 0.0))
    model.leaf, model.weight = model.leaf.detach()[:, :251].requires_grad_(), model.weight[:, :251]
    model.step(runtime.checkpoint)
    with pytest.raises(BudgetTooSmall) as caught:
        Adacc(runtime).end_step()
    assert '"memory_budget": 1.0.' in str(caught.value)
    fits = Runtime(load({"adacc": {"codecs": "none", "memory_budget": caught.value.smallest}}), has_engine=True)
    model.step(fits.checkpoint)
    Adacc(fits).end_step()


def test_a_reason_that_many_blocks_share_is_told_once():
    class Layer(ReadsData):
        def __init__(self, parts):
            super().__init__(WIDTH, 4, 0.0)
            self.parts = parts

        def forward(self, x):
            return torch.cat([part * 2.0 for part in super().forward(x).chunk(self.parts)])

    runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": "1KiB"}}), has_engine=True)
    parts = iter([1, 2, 4])  # so each is a block type of its own
    model = Model(lambda: Layer(next(parts)), layers=3)
    wrap_blocks({f"layers.{number}": block for number, block in enumerate(model.blocks)}, runtime)
    model.step(lambda block, x: block(x))
    with pytest.raises(BudgetTooSmall) as caught:
        Adacc(runtime).end_step()
    assert str(caught.value).count("Why no more of ") == 1
    names = str(caught.value).partition("Why no more of ")[2].partition(" is recomputed: test_budget_error.py:")[0]
    assert sorted(names.split(", ")) == ["layers.0 (Layer)", "layers.1 (Layer)", "layers.2 (Layer)"]


class Draws(zoo.GPTBlock):
    def forward(self, x):
        return super().forward(x * 1.0 if random.random() < 2 else x)


def test_it_tells_what_the_blocks_depend_on_that_cannot_be_watched():
    with pytest.raises(planner.InfeasibleBudget) as caught:
        runtime = Runtime(load({"adacc": {"codecs": "none", "memory_budget": 0.5}}), has_engine=True)
        Model(lambda: Draws(WIDTH, 4), 4).step(runtime.checkpoint)
        Adacc(runtime).end_step()
    reason = "it depends on random.random in forward, which ds_adacc cannot watch: nothing of it is recomputed."
    assert f"Why no more of Draws is recomputed: {reason}" in str(caught.value)


def test_what_it_says_to_set_does():
    with pytest.raises(planner.InfeasibleBudget) as caught:
        refused("1KiB").end_step()
    as_bytes, fraction = re.findall(r'"memory_budget": (\d+ |\d\.\d+)', str(caught.value))
    for budget in (int(as_bytes), float(fraction)):
        adacc = refused(budget)
        adacc.end_step()
        plan = adacc.runtime.controller.plan
        assert plan.peak <= plan.budget


def test_the_fraction_that_it_names_is_large_enough():
    """0.6315 * 3_000_000 is 1894499.9999999998 as a floating-point number."""
    assert fraction(1_894_500, 3_000_000) == "0.6316"
    assert fraction(1_894_499, 3_000_000) == "0.6315"
    assert fraction(3_000_000, 3_000_000) == "1.0"


def test_a_script_that_catches_it_keeps_nothing_alive(uncollected):
    """A search for the largest batch frees one model before it makes the next."""

    class Held:
        pass

    def refuses():
        held, adacc = Held(), refused("1KiB")
        with contextlib.suppress(BudgetTooSmall):
            adacc.end_step()
        return weakref.ref(held), weakref.ref(adacc.runtime)

    held, runtime = refuses()
    assert held() is None and runtime() is None


def test_a_rank_that_catches_it_keeps_nothing_of_it(monkeypatch, uncollected):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    class Held:
        pass

    def refuses():
        held = Held()
        try:
            raise planner.InfeasibleBudget(1, 2, True)
        except planner.InfeasibleBudget as error:
            _end_in_silence(error)
            return weakref.ref(held)

    assert refuses()() is None


@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_first_rank_prints_it(monkeypatch, is_first):
    printed = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, traceback: printed.append(value))
    adacc = refused("1KiB")
    ranks = adacc.runtime.controller.ranks
    with pytest.raises(planner.InfeasibleBudget) as caught:
        # the plan is made on the first rank; what the others do with the error is asked after it
        monkeypatch.setattr(type(ranks), "is_first", property(lambda _: is_first or sys.exc_info()[0] is None))
        adacc.end_step()
    sys.excepthook(type(caught.value), caught.value, None)
    other = ValueError("another")
    sys.excepthook(ValueError, other, None)
    assert printed == ([caught.value, other] if is_first else [other])
