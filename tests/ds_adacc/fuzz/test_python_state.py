"""Programs with Python state: a number that nothing but Python knows changes between steps, and no gradient is wrong.

`--fuzz-seed 7` runs one of them again.
"""

import logging
import random

import numpy as np
import pytest
import torch
import zoo
from fuzz.states import KEPT, case
from recomputing import recomputing

BATCH = 50


def pytest_generate_tests(metafunc):
    if "seeds" in metafunc.fixturenames:
        one = metafunc.config.getoption("--fuzz-seed")
        starts = range(0, len(KEPT), BATCH)  # each place for a number comes once
        batches = [[one]] if one is not None else [range(n, min(n + BATCH, len(KEPT))) for n in starts]
        metafunc.parametrize("seeds", batches, ids=[f"{batch[0]}-{batch[-1]}" for batch in batches])


@pytest.fixture
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def train(program, step_of):
    """The losses and gradients of all steps. `step_of` calls a block."""
    torch.manual_seed(0)
    scope = program.make()
    block = scope["Block"]()
    seen = []
    for number, value in enumerate(program.numbers):
        scope["change"](block, value)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(number)
        x = torch.randn(2, 4, 4, requires_grad=True)
        loss, gradients = zoo.gradients(block, (x, scope["argument"](value)), {}, step_of(block), seed=number)
        seen.append([loss, *(gradient.clone() for gradient in gradients.values())])
    return seen


def check(seed, runtime):
    """What is wrong with the case of this seed; None if nothing is."""
    program = case(seed)
    plain = train(program, lambda block: block)
    ours = train(program, lambda block: lambda *args: runtime.checkpoint(block, *args))
    wrong = [
        number
        for number, (a, b) in enumerate(zip(plain, ours, strict=True))
        if len(a) != len(b) or not all(map(torch.equal, a, b))
    ]
    return f"seed {seed} {program.names}: steps {wrong} of {program.numbers}\n{program.source}" if wrong else None


@pytest.mark.filterwarnings("ignore")
def test_no_gradient_is_wrong(seeds, quiet, monkeypatch):
    monkeypatch.delenv("FUZZ", raising=False)
    runtime = recomputing()
    failures = list(filter(None, (check(seed, runtime) for seed in seeds)))
    assert not failures, "\n\n".join([f"{len(failures)} of {len(seeds)} cases fail", *failures])
