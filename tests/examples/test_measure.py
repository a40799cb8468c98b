"""What measure.py finds of a small model, in real engines."""

import json

import processes
import pytest

OPTIONS = ["--layers", "4", "--width", "64", "--heads", "2", "--context", "64", "--steps", "2"]
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


def measure(tmp_path, what, *configs):
    arguments = [what, str(tmp_path / "result.json"), *map(str, configs), *OPTIONS]
    return processes.alone("examples/measure.py", arguments, processes.EXACT_MALLOC, tmp_path / "result.json")


def test_strategies_without_a_lossy_codec_have_the_exact_gradient(tmp_path, lossless):
    configs = [CONFIGS / "none.json", CONFIGS / "full_checkpointing.json", lossless(0.6), CONFIGS / "quantization.json"]
    found = measure(tmp_path, "time", *configs)
    assert {name: found[name]["gradient_error"] == 0 for name in found if name != "device"} == {
        "none": True,
        "full_checkpointing": True,
        "lossless": True,
        "quantization": False,
    }
    assert all(len(found[config.stem]["seconds"]) == 2 for config in configs)
    assert found["none"]["held_bytes"] is None and found["lossless"]["held_bytes"] > 0


def test_the_peak_is_that_of_the_activations(tmp_path, lossless):
    found = measure(tmp_path, "memory", lossless(0.6))
    assert found["planned_peak_bytes"] <= 0.6 * found["planned_without_bytes"]
    # Logits and what operators allocate for themselves come on top of the plan; gradients do not.
    assert abs(found["peak_bytes"] - found["planned_peak_bytes"]) < 4 * 2**20
    assert found["first_steps_peak_bytes"] > 0


def test_a_budget_that_nothing_fits_names_the_smallest(tmp_path, lossless):
    found = measure(tmp_path, "memory", lossless(2**20))
    assert found["infeasible"] is True
    assert found["smallest_bytes"] > 2**20
