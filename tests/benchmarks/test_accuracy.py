"""Runs of the comparison: a broken one resumes, a diverged one is told of, and the table is made of their rows."""

import json

import accuracy
import accuracy_report
import pytest
import torch
from accuracy_run import EXACT, Arm, Run, Setting, Training, relative_errors, run, warm_up, warmed_up

SETTING = Setting(exact=2, steps=4, layers=4, width=128, heads=2, context=64, batch=2, validation_batches=1)
PAPER, PLAIN = Run("plain", "paper", 0), Run("plain", EXACT, 0)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with an exact and a lossy run."""
    folder = tmp_path_factory.mktemp("work")
    warm_up(SETTING, 0, folder)
    for one in (PLAIN, PAPER):
        run(SETTING, one, folder)
    return folder


def rows(work, one):
    return accuracy_report.read(work)[one]


def values(found, key):
    return [row[key] for row in found if key in row]


def test_a_run_tells_of_its_steps_looks_plans_and_end(work):
    found = rows(work, PAPER)
    assert [row["step"] for row in found if "loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in found if "validation_loss" in row] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in found if "gradient_errors" in row] == [0, 4]
    assert all(0 <= errors["whole"] < 1 for errors in values(found, "gradient_errors"))
    assert values(found, "plan")[0]["reason"] == "first step recorded"
    assert values(found, "seen")
    assert found[-1]["end"] == "finished"


def test_the_exact_run_is_the_one_that_would_have_been_without_a_break(work):
    training = Training(SETTING, 0)
    losses = [training.step(number) for number in range(1, SETTING.exact + SETTING.steps + 1)]
    assert values(rows(work, PLAIN), "loss") == losses[SETTING.exact :]


def test_the_first_loss_under_an_arm_is_the_exact_one(work):
    assert values(rows(work, PAPER), "loss")[0] == values(rows(work, PLAIN), "loss")[0]


def test_a_broken_run_begins_again_and_a_finished_one_is_kept(work, tmp_path, monkeypatch):
    warm_up(SETTING, 0, tmp_path)
    step, done = Training.step, []

    def breaks(training, number):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(number)
        return step(training, number)

    monkeypatch.setattr(Training, "step", breaks)
    with pytest.raises(KeyboardInterrupt):
        run(SETTING, PLAIN, tmp_path)
    assert accuracy_report.read(tmp_path) == {}
    monkeypatch.setattr(Training, "step", step)
    run(SETTING, PLAIN, tmp_path)
    assert values(rows(tmp_path, PLAIN), "loss") == values(rows(work, PLAIN), "loss")
    monkeypatch.setattr(Training, "step", breaks)  # would raise
    run(SETTING, PLAIN, tmp_path)
    warm_up(SETTING, 0, tmp_path)


def test_a_diverged_run_ends_and_says_where(tmp_path, monkeypatch):
    warm_up(SETTING, 0, tmp_path)
    monkeypatch.setattr(Training, "step", lambda training, number: float("nan") if number == 5 else 1.0)
    run(SETTING, PLAIN, tmp_path)
    found = rows(tmp_path, PLAIN)
    assert len(values(found, "loss")) == 2
    assert (found[-1]["end"], found[-1]["step"]) == ("diverged", 3)


def test_a_budget_that_nothing_fits_ends_a_run_with_the_smallest(tmp_path, monkeypatch):
    warm_up(SETTING, 0, tmp_path)
    monkeypatch.setitem(accuracy.ARMS, "paper", {"codecs": "paper", "memory_budget": 1e-4})
    run(SETTING, PAPER, tmp_path)
    end = rows(tmp_path, PAPER)[-1]
    assert end["end"] == "infeasible" and end["smallest"] > 0


@pytest.mark.parametrize("codecs, is_lossy", [("none", False), ("quantization", True)])
def test_only_lossy_codecs_have_an_error(work, codecs, is_lossy):
    arm = Arm({"codecs": codecs, "memory_budget": 0.8}, warmed_up(SETTING, 0, work))
    list(arm.settle())
    (errors,) = values(arm.judge(), "gradient_errors")
    assert all((error > 0) == is_lossy for error in errors.values())


def test_errors_are_relative_and_by_part():
    exact = {"blocks.0.mlp.0.weight": torch.tensor([3.0]), "blocks.0.attention.qkv.bias": torch.tensor([4.0])}
    exact |= {"norm.bias": torch.ones(1), "blocks.0.attention.projection.bias": torch.ones(1), "tokens": torch.ones(1)}
    lossy = exact | {"blocks.0.mlp.0.weight": torch.tensor([6.0]), "tokens": torch.tensor([float("nan")])}
    errors = relative_errors(lossy, exact)
    assert errors == {"whole": None, "q, k, v": 0, "attention out": 0, "MLP": 1, "norms": 0, "rest": None}


def test_another_setting_needs_another_folder(tmp_path):
    accuracy.open_work(tmp_path / "work", SETTING)
    accuracy.open_work(tmp_path / "work", SETTING)
    with pytest.raises(SystemExit, match="another setting"):
        accuracy.open_work(tmp_path / "work", Setting(exact=1, steps=1))


def made(losses, validations, end="finished", error=None, **more):
    """The rows of a run with these losses."""
    found = [{"step": 0, "validation_loss": validations[0]}]
    found += [{"step": 0, "gradient_errors": {"whole": error, "MLP": error}}] if error else []
    found += [{"step": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    found += [{"step": i, "validation_loss": loss} for i, loss in enumerate(validations[1:], 1)]
    return [*found, {"end": end, **more}]


def test_losses_are_compared_with_the_exact_run_of_the_same_seed():
    runs = {
        Run("plain", EXACT, 0): made([4.0, 3.0], [5.0, 4.0, 3.0]),
        Run("plain", EXACT, 1): made([5.0, 4.0], [6.0, 5.0, 4.0]),
        Run("plain", "paper", 0): made([4.0, 3.5], [5.0, 4.5, 3.25], error=0.125),
        Run("plain", "paper", 1): made([5.0, 4.5], [6.0, 5.5, 4.75], error=0.375),
        Run("plain", "quantization", 0): made([4.0], [5.0], end="diverged", step=2),
        Run("plain", "quantization", 1): made([], [6.0], end="infeasible", smallest=2**20),
    }
    exact, quantization, paper = accuracy_report.summaries(runs)
    assert exact["validation_end"] == (3.5, 0.5**0.5)
    assert paper["validation_end"] == (0.5, 0.125**0.5)
    assert paper["validation_mean"][0] == 0.5
    assert paper["training_end"] == (0.5, 0.0)
    assert paper["training_mean"] == (0.25, 0.0)
    assert paper["errors_at_injection"]["whole"] == 0.25
    assert quantization["validation_end"] is None
    text = accuracy_report.losses_table([exact, quantization, paper])
    assert "| plain | paper | 2 | +0.5000 ± 0.3536 | +0.5000 ± 0.1768 | +0.5000 ± 0.0000 | +0.2500 ± 0.0000 |" in text
    assert "| 2; seed 0 diverged at step 2; seed 1 infeasible, needs 1.0 MiB | no seed finished |" in text


def test_a_run_without_its_exact_one_is_an_error():
    with pytest.raises(ValueError, match="no exact run"):
        accuracy_report.summaries({Run("plain", "paper", 3): made([4.0], [5.0, 4.0])})


def test_the_report_is_of_all_finished_runs(work, tmp_path):
    accuracy_report.report(SETTING, work, tmp_path)
    document = json.loads((tmp_path / "accuracy.json").read_text())
    assert [(row["injection"], row["arm"]) for row in document["rows"]] == [("plain", EXACT), ("plain", "paper")]
    assert document["setting"]["steps"] == SETTING.steps
    assert {path.name for path in tmp_path.iterdir()} == {f"accuracy.{kind}" for kind in ("md", "json", "png", "svg")}
