"""A program that still checkpoints its blocks is told so at its first step, with the place and the remedy."""

import gc

import pytest
import torch
import zoo
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeeds
from stack import WIDTH, Model
from torch.utils.checkpoint import checkpoint

from ds_adacc.config import load
from ds_adacc.runtime import other_checkpoints
from ds_adacc.runtime.other_checkpoints import CheckpointedTwice
from ds_adacc.runtime.runtime import Runtime


@pytest.fixture(autouse=True)
def without_hooks():
    """Torch's checkpoint leaves its hooks in place when what it calls raises, until its generator is collected."""
    yield
    gc.collect()


@pytest.fixture
def runtime():
    return Runtime(load({"adacc": {"memory_budget": "1KiB", "codecs": "none"}}), has_engine=True)


@pytest.fixture
def model():
    return Model(lambda: zoo.GPTBlock(WIDTH, 4, 0.1), layers=2)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torchs_checkpoint_is_named_with_its_place(runtime, model, use_reentrant):
    def call(block, x):
        return checkpoint(runtime.checkpoint, block, x, use_reentrant=use_reentrant)

    line = call.__code__.co_firstlineno + 1
    with pytest.raises(CheckpointedTwice) as caught:
        model.step(call)
    text = str(caught.value)
    assert f"runs inside torch.utils.checkpoint, which is called in line {line} of {__file__}. " in text
    assert "call the block itself there, without torch.utils.checkpoint" in text
    assert runtime.recordings == 0


def test_the_checkpointing_of_a_package_is_turned_off_there(runtime, model, monkeypatch):
    monkeypatch.setattr(other_checkpoints, "is_library", lambda module: module == __name__)
    with pytest.raises(CheckpointedTwice, match=r"turn off the gradient checkpointing of that package \(in timm"):
        model.step(lambda block, x: checkpoint(runtime.checkpoint, block, x, use_reentrant=False))


@pytest.mark.parametrize("function", [deepspeeds.checkpoint, deepspeeds.non_reentrant_checkpoint])
def test_deepspeeds_checkpointing_is_named_with_what_to_import(runtime, model, function, monkeypatch):
    monkeypatch.setattr(deepspeeds, "deepspeed_checkpointing_enabled", True)
    with pytest.raises(CheckpointedTwice, match=r"import ds_adacc\.checkpointing there in place of deepspeed"):
        model.step(lambda block, x: function(lambda y: runtime.checkpoint(block, y), x))


INSIDE = {
    "torch.utils.checkpoint": lambda *given: checkpoint(*given, use_reentrant=False),
    "torch.utils.checkpoint, reentrant": lambda *given: checkpoint(*given, use_reentrant=True),
    "deepspeed.runtime.activation_checkpointing.checkpointing": deepspeeds.checkpoint,
}


@pytest.mark.parametrize("inside", INSIDE)
def test_a_checkpoint_inside_a_block_is_the_programs_own_and_is_told_once(inside, caplog):
    runtime = Runtime(load({"adacc": {"memory_budget": 1.0, "codecs": "none", "rectifier": {"enabled": False}}}))
    blocks = [zoo.GPTBlock(WIDTH, 4, 0.0) for _ in range(2)]
    for _ in range(3):
        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        y = x * 1.0
        for block in blocks:
            y = runtime.checkpoint(lambda y, block=block: INSIDE[inside](block, y), y)
        y.sum().backward()
    module = inside.split(",")[0]
    assert runtime.recordings == 2
    assert caplog.text.count(f"calls {module} in its forward. That recomputes what runs in it") == 1
    assert caplog.text.count("take the checkpoint out: call directly what it is given") == 1
    for _, variant in runtime.blocks.variants():
        told = [remark for remark in variant.recording.remarks_on_replays if remark.startswith("it calls")]
        assert told == [f"it calls {module} in its forward, which recomputes what runs in it, whatever the plan says"]


def test_a_checkpoint_beside_a_block_is_nobodys_business(runtime, caplog):
    block, head = zoo.GPTBlock(WIDTH, 4, 0.0), torch.nn.Linear(WIDTH, WIDTH)
    y = runtime.checkpoint(block, torch.randn(2, 8, WIDTH, requires_grad=True))
    checkpoint(head, y, use_reentrant=False).sum().backward()
    assert runtime.recordings == 1
    assert "in its forward" not in caplog.text


def test_without_gradients_blocks_run_as_usual(runtime, model):
    with torch.no_grad():
        runtime.checkpoint(model.blocks[0], torch.randn(2, 8, WIDTH))
