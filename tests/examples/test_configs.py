"""Every file of ds_configs/ is one that DeepSpeed and ds_adacc accept."""

import json
from pathlib import Path

import pytest
from deepspeed import DeepSpeedConfig

from ds_adacc import config

FILES = sorted((Path(__file__).resolve().parents[2] / "ds_configs").glob("*.json"))


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request):
    return request.param


def test_deepspeed_reads_it(file):
    if file.stem == "trainer":
        pytest.skip("transformers fills in what is auto; test_finetune.py trains with it")
    ours = DeepSpeedConfig(str(file))
    assert ours.train_micro_batch_size_per_gpu == 8
    assert ours.optimizer_params["torch_adam"], "anything else is compiled at the first run"
    if file.stem.startswith("zero"):
        assert ours.zero_optimization_stage == int(file.stem[-1])


def test_adacc_accepts_its_section(file):
    section = config.load(str(file))
    assert bool(section) == ("adacc" in json.loads(file.read_text()))


def test_the_compared_differ_in_their_strategy_only():
    def rest(name):
        content = json.loads((FILES[0].parent / f"{name}.json").read_text())
        return {key: value for key, value in content.items() if key not in ("adacc", "activation_checkpointing")}

    compared = ["none", "full_checkpointing", "quantization", "adacc", "adacc_no_outliers", "compact"]
    assert all(rest(name) == rest("none") for name in compared)
