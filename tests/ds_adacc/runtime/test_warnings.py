"""What users are told of, each thing once."""

import types

import pytest

from ds_adacc.execute.block import Block
from ds_adacc.log import EngineLog
from ds_adacc.runtime.warnings import Warnings


@pytest.mark.parametrize("tell", [Warnings.diverged, Warnings.mispredicted])
def test_of_blocks_of_one_class_whose_calls_differ_the_first_is_named(tell, caplog):
    warnings, bound = Warnings(EngineLog()), types.SimpleNamespace(course=types.SimpleNamespace(instructions=()))
    for number in range(3):
        tell(warnings, Block(f"blocks.{number} (Block)"), bound, 0)
    (told,) = caplog.messages
    assert told.startswith("block blocks.0 (Block): ")
