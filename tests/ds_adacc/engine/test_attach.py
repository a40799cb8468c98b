"""Engines of other makers on two ranks: attached to, Hugging Face's Trainer, accelerate; and scripts run unchanged."""

import json

import pytest
from cases import cases_that_run, further
from launch import HERE, by_launcher, on_ranks, told

pytestmark = pytest.mark.ranks
SCRIPT = HERE / "unaware.py"
CASES = [
    *("attach 1", "attach 3 late", "accelerate 3"),
    *(further("trainer 0 gpt2"), "trainer 2 mixtral", "trainer 3 llama"),
]


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    out, run = tmp_path_factory.mktemp("adopt"), cases_that_run(request, "case")
    outputs = on_ranks("adopt_worker", out, *run)
    taken = [line for line in outputs[0].splitlines() if "gradient checkpointing is turned off" in line]
    assert len(taken) == sum(case.startswith("trainer") for case in run)
    return told(out)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_bit_identical_and_blocks_recompute(ranks, case):
    plans = []
    for rank in ranks:
        plain, served = rank[case]
        assert len(plain["losses"]) == 6
        assert served["losses"] == plain["losses"]
        assert plain["plan"] is None
        plans.append(served["plan"])
    assert plans[0]["policies"] == plans[1]["policies"]
    assert any(plans[0]["replays"])
    assert plans[0]["observed"] == plans[1]["observed"] == plans[0]["planned"]


def test_attach_says_what_it_does_not_take(ranks):
    for rank in ranks:
        no_engine, no_section, misspelt, midway, other, unnamed, disabled = rank["refusals"]
        assert (
            no_engine
            == "TypeError: attach needs a DeepSpeed engine: what deepspeed.initialize returns first, or accelerate's "
            "prepare if it trains with DeepSpeed; not Model"
        )
        assert no_section.startswith("ConfigError: adacc: the config has no such section; add it, or pass a ds_config")
        assert misspelt.startswith("ConfigError: adacc.memory_budgett = 0.5: unknown key; did you mean 'memory_budget'")
        assert (
            midway == "RuntimeError: attach between optimizer steps: 1 of this step's 2 micro-batches have already run"
        )
        assert other.startswith("ConfigError: adacc: this engine already runs with another section")
        assert "(memory_budget is " in other and " there, " in other
        assert unnamed == no_section
        assert disabled == (
            "ConfigError: adacc.enabled = False: this engine runs with ds_adacc already; to train without it, make "
            "another engine of the model with this section"
        )


_ONE_PROCESS = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
LAUNCHERS = {
    "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "1"],
    "accelerate": ["accelerate.commands.launch", "--use_deepspeed", *_ONE_PROCESS],
}


@pytest.mark.parametrize("by", ["deepspeed", further("accelerate")])
def test_a_script_that_does_not_know_of_adacc(by, tmp_path):
    out = tmp_path / "seen.json"
    code, said = by_launcher(*LAUNCHERS[by], "--module", "ds_adacc.run", SCRIPT, by, out, folder=tmp_path)
    assert code == 0, said[-6000:]
    seen = json.loads(out.read_text())
    local_rank = ["--local_rank=0"] if by == "deepspeed" else []
    assert seen["argv"] == [str(SCRIPT), *local_rank, by, str(out)]
    assert seen["path"] == str(SCRIPT.parent)
    assert seen["on"]["held"] > 0
    assert seen["off"]["held"] is None
    assert seen["on"]["losses"] == seen["off"]["losses"]
    assert said.count('adacc is off: the engine\'s config has no "adacc" section') == 1
