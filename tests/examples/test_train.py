"""The training example: its data, and a short run under DeepSpeed's launcher."""

import json
from itertools import islice
from types import SimpleNamespace

import processes
import pytest
import torch
import train
from launch import by_launcher, on_ranks


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of 100 files of one line each."""
    monkeypatch.setattr(train.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    for number in range(100):
        (tmp_path / f"module{number}.py").write_text(f"{number}\n" * 5)
    return tmp_path


def numbers(text):
    return {int(line) for line in text.split()}


def test_each_file_is_wholly_in_one_part(library):
    training, validation = map(numbers, train.standard_library())
    assert training | validation == set(range(100))
    assert not training & validation
    assert 0 < len(validation) < 30


def test_a_new_file_moves_no_other(library):
    before = [numbers(text) for text in train.standard_library()]
    (library / "another.py").write_text("100\n")
    after = [numbers(text) - {100} for text in train.standard_library()]
    assert before == after


def test_tests_and_installed_packages_are_left_out(library):
    for folder in ("test", "site-packages"):
        (library / folder).mkdir()
        (library / folder / "module.py").write_text("100\n")
    assert all(100 not in numbers(text) for text in train.standard_library())


def test_batches_depend_on_seed_rank_and_position_only():
    text = torch.arange(256, dtype=torch.uint8).repeat(4)

    def first(seed, rank):
        engine = SimpleNamespace(global_rank=rank, device=torch.device("cpu"), train_micro_batch_size_per_gpu=lambda: 3)
        return list(islice(train.batches(engine, text, 16, seed), 2))

    (tokens, targets), (later, _) = first(seed=0, rank=0)
    assert tokens.shape == targets.shape == (3, 16)
    assert torch.equal(targets, (tokens + 1) % 256)
    assert torch.equal(tokens, first(seed=0, rank=0)[0][0])
    for other in (later, first(seed=1, rank=0)[0][0], first(seed=0, rank=1)[0][0]):
        assert not torch.equal(tokens, other)


def test_a_bias_of_the_keys_leaves_the_function_as_it_is():
    torch.manual_seed(0)
    model = train.GPT(layers=2, width=32, heads=2, context=16).double()
    tokens = torch.randint(256, (2, 17))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    train.bias_keys(model, 100.0)
    bias = model.blocks[1].attention.qkv.bias.detach().view(3, 2, 16)
    assert bias[1, :, :3].tolist() == [[100.0, -100.0, 0.0]] * 2
    assert not bias[0].any() and not bias[2].any()
    torch.testing.assert_close(model(tokens[:, :-1], tokens[:, 1:]), loss, rtol=1e-12, atol=0)


def arguments(name, metrics, *options):
    """The arguments of a run of a ready config."""
    config = processes.ROOT / "ds_configs" / f"{name}.json"
    return ["--deepspeed", "--deepspeed_config", str(config), "--metrics", str(metrics), *options]


def told(metrics):
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.ranks
def test_three_steps_without_and_with_full_checkpointing(tmp_path):
    options = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--steps", "3", "--eval-every", "2"]
    files = [tmp_path / "none.jsonl", tmp_path / "full_checkpointing.jsonl"]
    for file in files:
        on_ranks(processes.ROOT / "examples" / "train.py", *arguments(file.stem, file, *options), ranks=1)
    plain, checkpointed = map(told, files)
    assert [line.get("step") for line in plain] == [1, 2, 2, 3, None]
    assert plain == checkpointed
    assert plain[-1]["validation_loss"] < 5.7


@pytest.mark.ranks
def test_three_steps_of_compiled_blocks_under_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_OVERRIDE_BACKENDS", ">=0:aot_eager")  # Inductor's C++ takes half a minute
    options = ["--layers", "4", "--width", "32", "--heads", "2", "--context", "32", "--steps", "3", "--compile"]
    metrics = tmp_path / "metrics.jsonl"
    with processes.free_port() as port:
        command = ["deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", port, "examples/train.py"]
        code, said = by_launcher(*command, *arguments("adacc", metrics, *options), folder=processes.ROOT)
    assert code == 0, said[-6000:]
    assert told(metrics)[-1]["validation_loss"] < 5.7
