"""Programs at several sizes: those used least recently are forgotten as a whole."""

import torch
import zoo
from any_size import Training
from recorded import profile_of, record
from torch import nn

from ds_adacc.program.signature import Sizes
from ds_adacc.sizes import symbolic_types as room
from ds_adacc.sizes.symbolic_program import Example
from ds_adacc.sizes.symbolic_types import SymbolicTypes


def learned(types, layers, *times):
    """The block types of a program with so many layers, at these sizes."""
    block = nn.Sequential(*(nn.Linear(zoo.WIDTH, zoo.WIDTH) for _ in range(layers)), nn.GELU())
    constants = {}
    for time in times:
        recording = record(block, (torch.randn(2, time, zoo.WIDTH, requires_grad=True),), {})
        example = Example(Sizes((2, time, zoo.WIDTH)), recording)
        types.learn(example, profile_of(recording), constants)
        constants[recording.digest] = recording.constants
    return [*constants]


def test_of_too_many_programs_the_least_recently_used_one_is_forgotten_with_all_its_sizes(monkeypatch):
    monkeypatch.setattr(room, "_MOST", 2)
    types = SymbolicTypes()
    first, second = (learned(types, layers, 3, 5) for layers in (1, 2))
    assert types.of(first[0]) is types.of(first[1]) is not None
    types.note_use(first[1])
    third = learned(types, 3, 3, 5)
    assert types.recorded == {*first, *third}
    assert not any(map(types.of, second))


def test_a_program_that_was_forgotten_is_learned_again():
    training = Training(rectifier={"enabled": False})
    types = training.runtime.controller.planning.new_sizes.symbolic_types
    for _ in range(2):
        for time in (20, 12, 16):
            training.compare(time)
        before = training.runtime.recordings
        training.compare(14)
        assert training.runtime.recordings == before
        for block in training.runtime.blocks.all():
            block.forget(block.digests)
        types._types.clear(), types._by_use.clear()
