"""A resumed run goes on as the uninterrupted one, to the bit; where that cannot be, it plans anew and says so."""

import csv
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch
import zoo
from launch import on_ranks, told
from torch import nn

from ds_adacc.config import load
from ds_adacc.engine import save_load as resume
from ds_adacc.engine.adacc import Adacc
from ds_adacc.engine.engine_methods import hooked
from ds_adacc.engine.save_load import load_checkpoint, save_checkpoint
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.runtime.runtime import Runtime

# saved after step 1, a plan is metered one step later, and tracking begins after it
INTERVALS = [1, 1, 1, 2, 2, 4, 4, 4, 4, 4, 4]
CASES = [("0 nearest", "1"), ("0 nearest", "5"), ("3 stochastic", "3")]  # after 5 steps, a tracking step is due
SECTION = {"memory_budget": 0.8, "codecs": "none", "solver": {"max_seconds": 30.0}}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("resume")
    on_ranks("resume_worker", out)
    return out


@pytest.fixture(scope="module")
def ranks(out):
    return told(out)


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "after"), CASES)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ranks, case, after):
    for rank in ranks:
        whole, part = rank[case]["whole"], rank[case]["resumed"][after]
        steps = len(whole["plans"]) - int(after)
        assert part["losses"] == whole["losses"][-2 * steps :]
        assert part["parameters"] == whole["parameters"]
        assert part["plans"] == whole["plans"][-steps:]
        assert part["schedule"] == whole["schedule"][-steps:]
        assert part["channels"] == whole["channels"]
        assert part["measured"] == 0
        assert part["client_state"] == int(after) - 1


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["0 nearest", "3 stochastic"])
def test_the_run_that_was_resumed_compresses_with_loss_and_plans_anew_later(ranks, case):
    for rank in ranks:
        whole = rank[case]["whole"]
        stores = {store for chosen in whole["plans"][0] for policy in chosen for store in policy["stores"]}
        assert "outlier" in stores
        intervals = [state["interval"] for state in whole["schedule"]]
        # which steps are for trials depends on the measured times, by which the plan is chosen
        assert intervals == INTERVALS if case == "0 nearest" else intervals[0] == 1 < max(intervals)


@pytest.mark.ranks
def test_both_ranks_plan_anew_where_the_file_of_one_is_damaged(ranks):
    first, second = (rank["damaged"] for rank in ranks)
    assert first["planned"] == second["planned"] == [True, False]
    (said,) = first["said"]
    assert "adacc_rank_00001.pt is damaged, or something else wrote it (UnpicklingError)" in said
    assert second["said"] == []


@pytest.mark.ranks
def test_the_monitor_has_the_events_at_every_step(out, ranks):
    held = read_csv(out, "held_bytes")
    planned = read_csv(out, "planned_held_bytes")
    assert [step for step, _ in planned[:11]] == [8 * step for step in range(1, 12)]
    assert held[:8] == [pair for pair in planned[:11] if 24 <= pair[0] != 80]  # three steps have a plan yet to be seen
    assert read_csv(out, "rectifier_replanned")[:3] == [(32, 0), (48, 0), (80, 1)]
    assert [value for _, value in read_csv(out, "rectifier_interval")[:11]] == INTERVALS
    assert all(0 < value < 1 for _, value in read_csv(out, "compression_rate_linear"))
    assert all(value > 0 for name in ("peak_bytes", "overhead_seconds") for _, value in read_csv(out, name))


@pytest.mark.ranks
def test_tensorboard_has_what_the_csv_files_have(out, ranks):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(out / "board")).Reload()
    tags = {tag for tag in board.Tags()["scalars"] if tag.startswith("Adacc/")}
    assert {tag.replace("/", "_") for tag in tags} == {path.stem for path in (out / "csv").glob("Adacc_*")}
    assert [event.step for event in board.Scalars("Adacc/planned_peak_bytes")][:9] == [8 * n for n in range(1, 10)]


def read_csv(out, name):
    """(global samples, value) in the order written."""
    with open(out / "csv" / f"Adacc_{name}.csv") as file:
        return [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]]


class Engine:
    """What of a DeepSpeed engine is asked for, over blocks without one; its own checkpoints are empty."""

    global_rank = 0
    device = torch.device("cpu")

    def __init__(self, layers=2, micro_batch=2, **section):
        torch.manual_seed(0)
        config = load({"adacc": SECTION | section})
        self.module = nn.ModuleList(zoo.GPTBlock(dropout=0.0) for _ in range(layers))
        self.adacc = Adacc(Runtime(config, has_engine=True))
        self.global_steps = 0
        self.train_micro_batch_size_per_gpu = lambda: micro_batch
        self.save_checkpoint = hooked(self, "save_checkpoint", save_checkpoint)
        self.load_checkpoint = hooked(self, "load_checkpoint", load_checkpoint)

    def save_checkpoint(self, save_dir, tag=None, client_state={}):  # noqa: B006, as DeepSpeed's
        return True

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_module_only=False):
        if not load_module_only:
            self.global_steps = int(tag.removeprefix("global_step"))
        return str(f"{load_dir}/{tag}/mp_rank_00_model_states.pt"), {}

    def step(self, time=9):
        x = torch.randn(2, time, zoo.WIDTH, requires_grad=True)
        for block in self.module:
            x = self.adacc.runtime.checkpoint(block, x)
        x.sum().backward()
        self.global_steps += 1
        self.adacc.end_step()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An engine after three steps, and the folder with its checkpoint."""
    engine, folder = Engine(), tmp_path_factory.mktemp("trained")
    for _ in range(3):
        engine.step()
    assert engine.save_checkpoint(folder)
    return engine, folder


@pytest.fixture
def saved(trained, tmp_path):
    """The same with a copy of the checkpoint, for a test to spoil."""
    engine, folder = trained
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return SimpleNamespace(engine=engine, folder=tmp_path, file=tmp_path / "global_step3" / "adacc_rank_00000.pt")


def resumed(saved, caplog, engine, **options):
    """What is said when the engine loads the checkpoint."""
    caplog.clear()
    with caplog.at_level("INFO", logger="ds_adacc"):
        engine.load_checkpoint(saved.folder, "global_step3", **options)
    return caplog.messages


def test_a_run_without_a_plan_goes_on_with_that_of_the_checkpoint(saved, caplog):
    (said,) = resumed(saved, caplog, engine := Engine())
    folder = saved.folder / "global_step3"
    assert said == f"the plan of the checkpoint {folder} is restored; it takes effect at the input sizes that it is for"
    assert engine.adacc.runtime.controller.plan == saved.engine.adacc.runtime.controller.plan
    assert engine.adacc.observed_held_bytes == saved.engine.adacc.observed_held_bytes > 0
    assert engine.adacc.runtime.controller.planning.schedule == saved.engine.adacc.runtime.controller.planning.schedule
    before = engine.adacc.runtime.controller.plan
    with caplog.at_level("INFO", logger="ds_adacc"):
        engine.step()
    assert engine.adacc.runtime.controller.plan is before
    assert "plan (restored from the checkpoint):" in caplog.text
    assert engine.adacc.runtime.state().agreement == saved.engine.adacc.runtime.state().agreement


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"memory_budget": 0.7}, "adacc.memory_budget was 0.8 and is 0.7"),
        ({"layers": 3}, "model was ModuleList "),
        ({"micro_batch": 4}, "micro-batch size was 2 and is 4"),
    ],
)
def test_another_run_plans_anew_and_says_why(saved, caplog, other, difference):
    (said,) = resumed(saved, caplog, engine := Engine(**other))
    assert said.startswith(f"a new plan is made: the checkpoint's {difference}")
    assert engine.adacc.runtime.controller.plan is None
    caplog.clear()
    with caplog.at_level("INFO", logger="ds_adacc"):
        engine.step()
    assert engine.adacc.runtime.controller.plan.reason == "first step recorded"
    assert f"step {engine.global_steps}: a plan is made" in caplog.text


def test_block_inputs_held_otherwise_are_planned_for_anew(saved, caplog):
    (engine := Engine()).adacc.runtime.controller.hold_inputs(InputPlacement(on_host=True))
    (said,) = resumed(saved, caplog, engine)
    assert said == "a new plan is made: the checkpoint's cpu_checkpointing was False and is True"


def test_block_inputs_held_otherwise_after_the_load_are_planned_for_anew_in_the_same_budget(saved, caplog):
    resumed(saved, caplog, engine := Engine())
    before = engine.adacc.runtime.controller.plan
    engine.adacc.runtime.controller.hold_inputs(InputPlacement(on_host=True))
    assert engine.adacc.runtime.controller.plan is before
    engine.step()
    assert engine.adacc.runtime.controller.plan is not before
    assert engine.adacc.runtime.controller.plan.budget == before.budget


def test_another_version_world_or_format_plans_anew(saved, caplog, monkeypatch):
    ours = resume.versions
    monkeypatch.setattr(resume, "versions", lambda: {**ours(), "ds_adacc": "9.9"})
    (said,) = resumed(saved, caplog, Engine())
    assert said.startswith("a new plan is made: the checkpoint's version of ds_adacc was ") and said.endswith("9.9")
    monkeypatch.setattr(resume, "versions", ours)
    (engine := Engine()).adacc.runtime.controller.ranks = SimpleNamespace(
        size=3, gather=lambda told: [told], is_first=True
    )
    (said,) = resumed(saved, caplog, engine)
    assert said == "a new plan is made: the checkpoint's number of ranks that plan together was 1 and is 3"
    now = resume.state_file.FORMAT
    monkeypatch.setattr(resume.state_file, "FORMAT", now + 1)
    (said,) = resumed(saved, caplog, Engine())
    by = "a new plan is made: another version of ds_adacc saved the checkpoint's plan"
    assert said == f"{by}, in format {now}; this one reads format {now + 1}"


def test_a_file_of_another_save_is_of_no_use(saved, caplog):
    document = torch.load(saved.file)
    document["facts"]["step"] = 4
    torch.save(document, saved.file)
    (said,) = resumed(saved, caplog, Engine())
    assert said == "a new plan is made: the checkpoint's step was 4 and is 3"


@pytest.mark.parametrize("length", [0, 100, -100])
def test_a_cut_off_file_is_no_reason_not_to_resume(saved, caplog, length):
    saved.file.write_bytes(saved.file.read_bytes()[:length])
    (said,) = resumed(saved, caplog, engine := Engine())
    assert said.startswith(f"a new plan is made: {saved.file} is damaged, or something else wrote it (")
    engine.step()


def test_a_file_that_cannot_be_read_is_called_so(saved, caplog):
    saved.file.unlink()
    saved.file.mkdir()
    (said,) = resumed(saved, caplog, Engine())
    assert said == f"a new plan is made: {saved.file} cannot be read: [Errno 21] Is a directory: '{saved.file}'"


def test_a_policy_that_cannot_be_carried_out_is_damage(saved, caplog):
    document = torch.load(saved.file)
    for agreed in document["plain"]["agreement"]["agreed"]:
        for policy in agreed["policies"]:
            policy["stores"] = policy["stores"][1:]
    torch.save(document, saved.file)
    (said,) = resumed(saved, caplog, Engine())
    assert said.startswith(f"a new plan is made: {saved.file} is damaged, or something else wrote it (ValueError)")


def test_a_checkpoint_of_deepspeed_alone_is_told_of(saved, caplog):
    saved.file.unlink()
    (said,) = resumed(saved, caplog, Engine())
    assert said == f"a new plan is made: the checkpoint has no file {saved.file}"


def test_weights_alone_leave_the_plan_as_it_is(saved, caplog):
    before = saved.engine.adacc.runtime.controller.plan
    assert resumed(saved, caplog, saved.engine, load_module_only=True) == []
    assert saved.engine.adacc.runtime.controller.plan is before
    assert saved.engine.adacc.runtime.blocks.variants()


def test_blocks_of_another_program_are_told_of_and_planned_for_in_the_same_budget(saved, caplog):
    resumed(saved, caplog, engine := Engine())
    budget = engine.adacc.runtime.controller.plan.budget
    engine.step(time=7)
    assert "the checkpoint's plan is for other blocks or input sizes" in caplog.text
    assert engine.adacc.runtime.controller.plan.reason == "new shapes or programs recorded"
    assert engine.adacc.runtime.controller.plan.budget == budget


def test_what_a_resumed_run_has_yet_to_meet_is_saved_again(saved, caplog):
    resumed(saved, caplog, engine := Engine())
    again, before = engine.adacc.runtime.state(), saved.engine.adacc.runtime.state()
    assert again.agreement == before.agreement and again.profiles == before.profiles
    assert [block["name"] for block in again.blocks] == [block["name"] for block in before.blocks]
    assert [len(block["records"]) for block in again.blocks] == [1, 1]


def test_a_plan_that_is_yet_to_be_looked_at_is_looked_at_after_the_next_step(tmp_path):
    (engine := Engine()).step()
    engine.save_checkpoint(tmp_path)
    (other := Engine()).load_checkpoint(tmp_path, "global_step1")
    for run in (engine, other):
        run.step()
        assert run.adacc.runtime.controller.observation is None
        run.step()
        assert run.adacc.runtime.controller.observation.peak is not None


@pytest.mark.usefixtures("equal_times")
def test_a_run_that_is_saved_after_every_step_is_looked_at_and_tracked_all_the_same(tmp_path):
    engine = Engine(codecs="paper", group_size=16)
    tracked = []
    for _ in range(6):
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        tracked.append(engine.adacc.runtime.controller.step.is_tracking)
    assert engine.adacc.observed_held_bytes == engine.adacc.planned_held_bytes
    assert tracked == [False, False, True, False, True, False]


def test_a_disk_that_fails_stops_no_run(tmp_path, caplog):
    (tmp_path / "global_step0").write_text("a file where a folder should be")
    engine = Engine()
    assert engine.save_checkpoint(tmp_path)
    assert "A run resumed from there makes a new one" in caplog.text


def test_nor_does_a_disk_that_is_full(tmp_path, caplog):
    engine = Engine()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert engine.save_checkpoint(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "A run resumed from there makes a new one" in caplog.text
    assert list((tmp_path / "global_step0").iterdir()) == []
