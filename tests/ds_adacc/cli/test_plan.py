"""`ds_adacc plan` says before training what a budget costs, and every bad input is one line."""

import contextlib
import io
import json
import math
import re
import sys
import weakref
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

import ds_adacc
from ds_adacc import planner
from ds_adacc.cli import factory as cli_factory
from ds_adacc.cli.batch_size import BatchLine
from ds_adacc.cli.factory import Factory, record
from ds_adacc.cli.main import main
from ds_adacc.cli.plan import _stages
from ds_adacc.cli.plan_computation import plan
from ds_adacc.cli.plan_view import _changes, view
from ds_adacc.cli.plan_view import document as document_of
from ds_adacc.config import load
from ds_adacc.plan.step_peak import StepPeak
from ds_adacc.planner.solve_uniform import least_peak
from ds_adacc.profile import measure

SECTION = {"memory_budget": 0.5, "codecs": {"gelu": "group"}, "backend": "reference", "solver": {"max_seconds": 2.0}}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The folder of factories.py is the current one, and imported from no longer than a test."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(Path(__file__).parent)


@pytest.fixture
def config(tmp_path):
    """The path of a config with this section, or with these keys besides."""

    def write(**keys):
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps({"adacc": {**SECTION, **keys}}))
        return str(path)

    return write


def test_a_model_is_gone_when_it_was_recorded(uncollected, monkeypatch):
    """The one of another micro-batch size, which comes next, may need the memory."""
    made, factory = [], Factory("factories:gpt")

    def noting(batch):
        model, *inputs = make(batch)
        made.extend(map(weakref.ref, (model, *model.parameters())))
        return model, *inputs

    make = sys.modules["factories"].gpt
    monkeypatch.setattr(factory, "_function", noting)
    record(factory, load({"adacc": SECTION}), 2)
    assert made and not any(each() is not None for each in made)


@pytest.fixture(scope="module")
def recorded():
    """The tiny GPT at 2, 4 and 16 samples, with gradient errors."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        factory = Factory("factories:gpt")
    finally:
        sys.path.remove(str(Path(__file__).parent))
    section = load({"adacc": {**SECTION, "max_gradient_error": 0.9}})
    return {batch: record(factory, section, batch) for batch in (2, 4, 16)}


@pytest.fixture(scope="module")
def planned(recorded):
    stages = []
    made = plan((recorded[2], recorded[4]), load({"adacc": SECTION}), stages.append)
    assert stages == ["finding the frontiers", "planning", "comparing", "estimating the largest micro-batch"]
    return made


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """The whole command with figures: its exit code, stdout, and the folder."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "c.json").write_text(json.dumps({"adacc": {**SECTION, "codecs": "none", "memory_budget": 0.6}}))
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.syspath_prepend(str(Path(__file__).parent))
        arguments = ["plan", str(folder / "c.json"), "factories:gpt", "--out", str(folder / "out"), "--json"]
        code = main(arguments)
    return code, out.getvalue(), folder / "out"


# recording


def test_the_problem_is_that_of_the_model_s_blocks(recorded):
    problem = recorded[2].problem
    assert [(block_type.name, block_type.count, block_type.blocks) for block_type in problem.block_types] == [
        ("blocks.0 (GPTBlock)", 3, 3)
    ]
    assert problem.order == ("blocks.0 (GPTBlock)",) * 3
    assert recorded[2].known.keys() == {"blocks.0 (GPTBlock)"}


def test_the_log_tells_of_no_plan_for_training(caplog):
    record(Factory("factories:gpt"), load({"adacc": SECTION}), 2)
    assert "a plan is made" not in caplog.text


def test_what_recording_takes_is_not_taken_for_training_s(monkeypatch):
    """A budget of "auto" is what training leaves. On a CUDA device, recording may take more."""
    aside = []
    monkeypatch.setattr(StepPeak, "aside", lambda peak: aside.append(peak) or contextlib.nullcontext())
    monkeypatch.setattr(cli_factory, "available_bytes", lambda device, recomputed, peak: aside.index(peak))
    auto = record(Factory("factories:gpt"), load({"adacc": {**SECTION, "memory_budget": "auto"}}), 2)
    assert auto.available == 0 and len(aside) > 1


def test_compact_is_planned_with():
    section = load({"adacc": {**SECTION, "codecs": "none", "compact": {"rank": 4}}})
    (known,) = record(Factory("factories:gpt"), section, 2).known.values()
    values = [known.recording.values[index] for index in known.recording.saved]
    projections = {value.label: value.geometry.size[-1] for value in values if value.label.endswith("projection")}
    assert projections == {"qkv projection": 4, "fc1 projection": 4, "fc2 projection": 4}


def test_kinds_are_named_after_their_first_blocks_in_forward_order():
    problem = record(Factory("factories:two_kinds"), load({"adacc": SECTION}), 2).problem
    first, second = "blocks.0 (GPTBlock)", "blocks.1 (GPTBlock)"
    assert [(block_type.name, block_type.count) for block_type in problem.block_types] == [(first, 1), (second, 2)]
    assert problem.order == (first, second, second)


@pytest.mark.parametrize("name", ["keywords", "with_loss"])
def test_arguments_may_be_keywords_and_the_output_may_have_a_loss(name, recorded):
    found = record(Factory(f"factories:{name}"), load({"adacc": SECTION}), 2)
    assert found.problem.order == recorded[2].problem.order
    for block_type, other in zip(found.problem.block_types, recorded[2].problem.block_types, strict=True):
        assert block_type.profile.graph == other.profile.graph


# the plan


def test_the_document_is_the_planner_s_own_numbers(planned):
    told = document_of(planned)
    assert told.keys() == {
        "batch",
        "device",
        "budget",
        "without",
        "smallest",
        "block_types",
        "plan",
        "baselines",
        "largest_batch",
    }
    problem, solution = planned.problem, planned.solution
    assert (told["batch"], told["device"], told["smallest"]) == (2, "cpu", None)
    retained = [[planner.retain_policy(block_type.profile)] * block_type.blocks for block_type in problem.block_types]
    assert told["without"] == planner.peak_bytes(problem, retained)
    assert told["budget"] == told["without"] // 2
    assert told["plan"] == {
        "peak": planner.peak_bytes(problem, solution.policies),
        "held": sum(planner.held_bytes(problem, solution.policies)),
        "added_seconds": planner.added_seconds(problem, solution.policies),
        "solve_seconds": planned.solve_seconds,
        "proven_optimal": solution.proven_optimal,
    }
    assert told["plan"]["peak"] <= told["budget"]
    assert json.loads(json.dumps(told)) == {**told, "largest_batch": {**told["largest_batch"], "recorded": [2, 4]}}


def test_a_kind_s_frontier_and_policies_are_told_value_by_value(planned):
    for block_type, of_type, chosen in zip(
        planned.problem.block_types, document_of(planned)["block_types"], planned.solution.policies, strict=True
    ):
        assert of_type.keys() == {"name", "blocks", "calls", "operators", "values", "frontier", "policies"}
        assert sum(policy["blocks"] for policy in of_type["policies"]) == block_type.blocks
        points = of_type["frontier"]
        assert all(point.keys() == {"held", "added_seconds", "gradient_error", "choices"} for point in points)
        assert [point["held"] for point in points] == sorted((p["held"] for p in points), reverse=True)
        assert points[0]["added_seconds"] == 0 and set(points[0]["choices"].values()) == {"retain"}
        found = planned.frontiers[block_type.name]
        assert [point["gradient_error"] for point in points] == [point.gradient_error for point in found]
        calls = [planner.simulate(block_type.profile, policy) for policy in dict.fromkeys(chosen)]
        assert [policy["held"] for policy in of_type["policies"]] == [call.held for call in calls]
        assert [policy["added_seconds"] for policy in of_type["policies"]] == [call.seconds for call in calls]


def test_every_baseline_has_its_cost(planned):
    costs = {costs["name"]: costs for costs in document_of(planned)["baselines"]}
    names = ("retain all", "recompute all", "compress all", "greedy", "one policy")
    assert tuple(costs) == names
    assert all(c.keys() == {"name", "peak", "added_seconds", "fits"} for c in costs.values())
    assert costs["retain all"]["peak"] == planned.without and costs["retain all"]["fits"] is False
    assert all(c["fits"] == (c["peak"] <= planned.budget) for c in costs.values())
    assert costs["one policy"]["added_seconds"] >= planned.solution.added_seconds


def test_the_view_has_a_table_of_each(planned):
    console = Console(width=80, file=io.StringIO())
    console.print(view(planned))
    text = " ".join(console.file.getvalue().split())
    assert all(len(line) <= 80 for line in console.file.getvalue().splitlines())
    for title in (
        "What micro-batch 2 holds between forward and backward",
        "What a call of blocks.0 (GPTBlock) can hold, ",
        "The plan for blocks.0 (GPTBlock)",
        "Other strategies",
        "Largest micro-batch within the budget",
        "(estimated: bytes grow on the line through micro-batches 2 and 4)",
    ):
        assert title in text
    budget, peak = planner.human_bytes(planned.budget), planner.human_bytes(planned.solution.peak)
    assert f"budget: {budget}, 0.50 of the peak without checkpointing peak: {peak}, of which " in text
    assert "held added ms error blocks what changes" in text
    assert "error: of the block's gradient, as estimated" in text
    assert "attention out" in text and "native_layer_norm" not in text


def test_what_changes_is_told_by_names_the_largest_first():
    nbytes = {"a": 1, "b": 9, "c": 3, "d": 4, "e": 2, "f": 1}
    before = dict.fromkeys("abcde", "retain")
    after = {"a": "retain", "b": "offload asymmetric8", "c": "recompute", "e": "recompute", "f": "recompute"}
    told = "offload asymmetric8 b; drop d; recompute c, e, f"
    assert _changes(before, after, nbytes) == told
    assert _changes(before, before, nbytes) == "statistics only"
    assert _changes(before, dict.fromkeys("abcd", "bits") | {"e": "retain"}, nbytes) == "bits b, d, c, a"
    assert _changes(before, dict.fromkeys("abcde", "bits"), nbytes) == "bits b, d, c and 2 more"


def test_the_estimate_is_the_plan_s_own_peak_at_a_batch_that_was_not_recorded(recorded, planned):
    line, truth = BatchLine((recorded[2].problem, recorded[4].problem), (2, 4)), recorded[16].problem
    estimated = line.at(16)
    peaks = [[planner.peak_without(problem) for problem in (estimated, truth)]]
    peaks += [[planner.everywhere(planner.recompute_policy, problem).peak for problem in (estimated, truth)]]
    peaks += [[least_peak(problem, 5.0).peak for problem in (estimated, truth)]]
    for estimate, peak in peaks:
        assert estimate == pytest.approx(peak, rel=0.05)


def test_the_largest_micro_batch_is_the_last_whose_peak_fits(recorded, planned):
    line = BatchLine((recorded[2].problem, recorded[4].problem), (2, 4))
    policies = [
        [planner.recompute_policy(block_type.profile)] * block_type.blocks
        for block_type in line.problems[0].block_types
    ]
    largest = planned.estimate.largest
    assert largest.keys() == {"smallest peak", "full checkpointing", "no checkpointing"}
    most = largest["full checkpointing"]
    assert (
        planner.peak_bytes(line.at(most), policies) <= planned.budget < planner.peak_bytes(line.at(most + 1), policies)
    )
    assert largest["no checkpointing"] <= most <= largest["smallest peak"]


# the command


def test_the_command_writes_one_document_and_the_figures(answered):
    code, out, folder = answered
    told = json.loads(out)
    assert code == 0 and told["factory"] == "factories:gpt" and told["batch"] == 2
    assert all(
        point["gradient_error"] is None for block_type in told["block_types"] for point in block_type["frontier"]
    )
    assert json.loads((folder / "plan.json").read_text()) == told
    distinct = {place: len(block_type["policies"]) for place, block_type in enumerate(told["block_types"], start=1)}
    graphs = {f"graph-{place}-{n}" for place, count in distinct.items() for n in range(1, count + 1)}
    names = {"frontier-1", "timeline", *graphs}
    assert {path.name for path in folder.iterdir()} == {
        "plan.json",
        *(f"{n}.{e}" for n in names for e in ("png", "svg")),
    }
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("}svg")


def test_a_budget_that_nothing_fits_is_exit_code_1_and_names_the_smallest(config, document):
    code, told = document("plan", config(codecs="none"), "factories:gpt", "--budget", "0.01", "--batch", "2")
    assert code == 1 and told["plan"] is None
    assert told["budget"] == told["without"] // 100 < told["smallest"] < told["without"]
    assert all(block_type["policies"] == [] for block_type in told["block_types"])
    assert not any(costs["fits"] for costs in told["baselines"])
    assert set(told["largest_batch"]["estimates"].values()) == {0}


def test_what_would_fit_is_said_as_the_section_wants_it(config, said):
    arguments = config(codecs="none"), "factories:gpt", "--batch", "2"
    _, out, _ = said("plan", *arguments, "--budget", "0.01")
    *_, last = out.rstrip("\n").rpartition("\n\n")
    assert last.startswith("NO PLAN FITS ") and out.count("NO PLAN FITS") == 2
    in_bytes, fraction = re.findall(r'"memory_budget":\s([0-9.]+)', last)
    for budget in (in_bytes, fraction):
        assert said("plan", *arguments, "--budget", budget)[0] == 0


def test_programs_that_differ_with_the_micro_batch_are_not_estimated_from(config, said):
    code, out, _ = said("plan", config(codecs="none"), "factories:other_program", "--batch", "2", "3")
    assert code == 0
    assert "no estimate of the largest micro-batch:\n  at micro-batch 3 the blocks run other operators than at 2" in out


def test_lengths_that_differ_are_not_estimated_from(config, said):
    code, out, _ = said("plan", config(codecs="none"), "factories:any_length", "--batch", "2", "4")
    assert code == 0
    assert "the input of a block takes 4.00 KiB at micro-batch 2 and 6.50 KiB at 4,\n" in out
    assert "which is not in proportion; your function must return sequences of one length\n" in out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_is_being_done_is_shown_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with _stages() as stage:
        stage("recording")
    assert "recording" in sys.stderr.getvalue()


def test_what_is_being_done_is_a_line_each_in_a_file(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with _stages() as stage:
        stage("recording")
        assert sys.stderr.getvalue() == "recording ...\n"
        stage("planning")
    assert sys.stderr.getvalue() == "recording ...\nplanning ...\n"


# bad input


def test_figures_need_matplotlib(config, said, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ds_adacc.cli.plots", None)
    error = refused(said, config(), "factories:gpt", "--out", str(tmp_path / "out"))
    assert error.startswith("ds_adacc plan: --out draws with matplotlib: pip install 'ds_adacc[plots]' (")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_recorded(config, said, tmp_path):
    (tmp_path / "file").touch()
    told = f"ds_adacc plan: --out {tmp_path}/file: [Errno 17] File exists: '{tmp_path}/file'\n"
    assert refused(said, config(), "factories:gpt", "--out", str(tmp_path / "file")) == told


def refused(said, *arguments):
    code, out, err = said("plan", *arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("factories", "must be MODULE:FUNCTION, such as big:make"),
        (":gpt", "must be MODULE:FUNCTION, such as big:make"),
        ("no_such:gpt", "module 'no_such' cannot be imported: ModuleNotFoundError: No module named 'no_such'"),
        ("factories:gtp", "module 'factories' has no function 'gtp'; did you mean 'gpt'?"),
        ("factories:value", "module 'factories' has no function 'value'"),
        ("factories:raises", "(raises): no weights for micro-batch 2"),
        ("factories:only_a_model", "returned GPT; it must return (model, inputs): an nn.Module, and "),
        ("factories:no_model", "returned (str, Tensor); it must return (model, inputs): "),
        ("factories:fails", "a forward and backward at micro-batch 2 raised RuntimeError at "),
        (
            "factories:no_gradient",
            "raised TypeError: the output, dict, has no floating-point tensor that needs a gradi",
        ),
        (
            "factories:always_two",
            "returned inputs of the same size for micro-batches 2 and 4; it must make its inputs for the micro-batch",
        ),
        ("factories:no_argument", "is no_argument(); it must take the micro-batch size as its only argument, as in "),
        ("factories.py:gpt", "'factories' is not a package; did you mean factories:gpt?"),
        ("factories:no_block", "no block found; name the blocks' classes in adacc.blocks"),
        ("factories:unrecordable", "no block could be recorded; the log says why"),
        ("factories:idle", "none of the 3 blocks found (the first: blocks.0) ran; name those that do in adacc.blocks"),
    ],
)
def test_a_factory_that_does_not_serve_is_told_why(factory, message, config, said):
    error = refused(said, config(), factory, "--batch", "2")
    assert f"ds_adacc plan: function {factory!r}" in error and message in error


def test_a_model_that_is_compiled_as_a_whole_is_refused_as_in_training(config, said):
    model, _, _ = Factory("factories:compiled_as_a_whole").make(2)
    with pytest.raises(ValueError, match=r"the model \(GPT\) is compiled as a whole") as error:
        ds_adacc.initialize(model=model, config={"adacc": SECTION})
    said_of_it = refused(said, config(), "factories:compiled_as_a_whole", "--batch", "2")
    assert said_of_it.endswith(f"\nds_adacc plan: {error.value}\n")


def test_a_module_that_does_not_import_is_named_with_the_reason(config, said, tmp_path, monkeypatch):
    (tmp_path / "broken_factory.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert refused(said, config(), "broken_factory:make") == (
        "ds_adacc plan: function 'broken_factory:make': module 'broken_factory' cannot be imported: "
        "ZeroDivisionError at broken_factory.py:1 (<module>): division by zero\n"
    )


def test_times_that_are_no_numbers_are_named(config, said, monkeypatch):
    monkeypatch.setattr(measure.Timer, "__call__", lambda self, function, others=(): math.nan)
    error = refused(said, config(codecs="none"), "factories:gpt")
    assert "(forward): overlap_seconds of forward is nan; it must be finite and non-negative" in error


def test_a_factory_without_a_default_wants_a_batch(config, said):
    error = refused(said, config(), "factories:without_default")
    assert error.endswith(
        "'factories:without_default' has no default micro-batch size, and the config has no "
        "train_micro_batch_size_per_gpu; give one with --batch\n"
    )


def test_a_factory_without_a_default_is_given_that_of_the_config(config, document):
    path = Path(config(codecs="none"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "train_micro_batch_size_per_gpu": 3}))
    _, told = document("plan", str(path), "factories:without_default")
    assert told["batch"] == 3


def test_where_not_even_one_sample_fits_it_is_said(config, said):
    _, out, _ = said("plan", config(codecs="none"), "factories:gpt", "--budget", "0.001")
    assert [line.split()[-3:] for line in out.splitlines() if line.startswith("  full checkpointing")] == [
        ["not", "even", "1"]
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (["0"], "--batch 0: give one or two sizes of at least 1"),
        (["1", "2", "3"], "--batch 1 2 3: give one or two sizes of at least 1"),
        (["2", "2"], "--batch 2 2: the sizes must differ"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes, message, config, said):
    assert refused(said, config(), "factories:gpt", "--batch", *sizes) == f"ds_adacc plan: {message}\n"


def test_config_errors_are_told_as_ever(config, said, tmp_path):
    assert "adacc.codex" in refused(said, config(codex="none"), "factories:gpt")
    assert "adacc.memory_budget = 'lots'" in refused(said, config(), "factories:gpt", "--budget", "lots")
    assert "no module of class 'Blok'" in refused(said, config(blocks=["Blok"]), "factories:gpt")
    assert "no such file" in refused(said, str(tmp_path / "none.json"), "factories:gpt")
    (tmp_path / "other.json").write_text('{"adacc": {"enabled": false}}')
    other = str(tmp_path / "other.json")
    assert refused(said, other, "factories:gpt") == (
        f'ds_adacc plan: {other}: has no "adacc" section, or it is disabled\n'
    )


def test_the_first_search_needs_some_time(config, said):
    error = refused(said, config(solver={"max_seconds": 1e-9}), "factories:gpt")
    assert "seconds. If that is a lack of time, raise adacc.solver.max_seconds (now 1e-09)" in error


def test_the_option_replaces_the_budget_of_a_section_from_the_environment(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ADACC_CONFIG", json.dumps({**SECTION, "codecs": "none"}))
    (tmp_path / "c.json").write_text("{}")
    assert main(["plan", str(tmp_path / "c.json"), "factories:gpt", "--budget", "0.8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["budget"] == int(0.8 * told["without"])
