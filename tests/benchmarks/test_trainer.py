"""benchmarks/gpu/trainer.py: a trainer that is closed leaves all its memory to the next one."""

import pytest
from launch import on_ranks
from processes import ROOT

pytestmark = pytest.mark.ranks

FOLDERS = [str(ROOT / folder) for folder in ("benchmarks", "benchmarks/gpu", "examples", "tests/helpers")]
PROGRAM = f"""
import sys
sys.path[:0] = {FOLDERS}
import weakref, stage, torch
from itertools import product
from models import SMALL
from trainer import Trainer

with stage.one_rank():
    for zero, section in product((1, 3), (None, {{"memory_budget": 0.4, "codecs": "none"}})):
        trainer = Trainer("GPT", SMALL, torch.device("cpu"), stage=zero, section=section)
        for _ in range(3):
            trainer.step()
        parameters = [weakref.ref(parameter) for parameter in trainer.engine.module.parameters()]
        trainer.close()
        print("alive:", zero, sum(parameter() is not None for parameter in parameters), "of", len(parameters))
"""


@pytest.mark.further
def test_no_parameter_outlives_its_engine(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    (said,) = on_ranks(script, ranks=1)
    alive = [line for line in said.splitlines() if line.startswith("alive: ")]
    assert alive == ["alive: 1 0 of 52"] * 2 + ["alive: 3 0 of 52"] * 2, said[-2000:]
