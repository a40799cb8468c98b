"""What measure.py finds of a small model, in real engines."""

import json

import processes
import pytest
from launch import on_ranks

OPTIONS = ["--layers", "3", "--width", "64", "--heads", "2", "--context", "64", "--steps", "2"]
CONFIGS = processes.ROOT / "ds_configs"

pytestmark = pytest.mark.ranks


@pytest.fixture
def lossless(tmp_path):
    """Writes Adacc's config without lossy codecs, under a budget."""

    def write(budget):
        config = json.loads((CONFIGS / "adacc.json").read_text())
        config["adacc"] = {"codecs": "none", "memory_budget": budget}
        file = tmp_path / "lossless.json"
        file.write_text(json.dumps(config))
        return file

    return write


def measure(tmp_path, what, *arguments):
    """What it finds in a process that gives freed memory back at once, so that its memory can be measured."""
    arguments = [what, str(tmp_path / "result.json"), *map(str, arguments), *OPTIONS]
    return processes.alone("examples/measure.py", arguments, processes.EXACT_MALLOC, tmp_path / "result.json")


def measure_quickly(tmp_path, what, *arguments):
    """What it finds in a process that has imported all before, where memory does not matter."""
    result = tmp_path / "result.json"
    on_ranks(processes.ROOT / "examples" / "measure.py", what, result, *arguments, *OPTIONS, ranks=1)
    return json.loads(result.read_text())


def test_strategies_without_a_lossy_codec_have_the_exact_gradient(tmp_path, lossless):
    ready = [CONFIGS / f"{name}.json" for name in ("none", "full_checkpointing", "quantization", "compact")]
    configs = [*ready, lossless(0.6)]
    found = measure_quickly(tmp_path, "time", *configs)
    assert {name: found[name]["gradient_error"] == 0 for name in found if name != "device"} == {
        "none": True,
        "full_checkpointing": True,
        "lossless": True,
        "quantization": False,
        "compact": False,
    }
    assert 0.05 < found["compact"]["gradient_error"] < 3  # P Pᵀ of a quarter of the features is not the identity
    assert all(len(found[config.stem]["seconds"]) == 2 for config in configs)
    assert found["none"]["held_bytes"] is None and found["lossless"]["held_bytes"] > 0


def test_a_run_has_its_losses_and_the_peak_of_the_activations(tmp_path, lossless):
    found = measure(tmp_path, "run", lossless(0.6), "--at-most", 2**30)
    # Until the first steady step, however few steps were asked for.
    assert len(found["losses"]) > 2 and 4 < found["validation_loss"] < 6
    assert found["planned_peak_bytes"] <= 0.6 * found["planned_without_bytes"]
    # Logits and what operators allocate for themselves come on top of the plan; gradients do not.
    assert abs(found["peak_bytes"] - found["planned_peak_bytes"]) < 4 * 2**20
    assert found["first_steps_peak_bytes"] > 0


def test_a_run_that_takes_too_much_ends_at_its_first_steady_step(tmp_path, lossless):
    found = measure_quickly(tmp_path, "run", lossless(0.6), "--at-most", 2**10)
    assert set(found) == {"device", "peak_bytes"} and found["peak_bytes"] > 2**10


def test_a_budget_that_nothing_fits_names_the_smallest(tmp_path, lossless):
    found = measure_quickly(tmp_path, "run", lossless(2**20))
    assert found["infeasible"] is True
    assert found["smallest_bytes"] > 2**20
