"""CompAct under DeepSpeed, two ranks: beside a plain reference, in 16 bits, resumed, and under a plan."""

import math

import deepspeed
import pytest
import torch
from cases import further
from compact_worker import EXACT, FROZEN, RANK, RESUMED, ROUNDED, SAVED_AFTER, STEPS, label, new_model
from deepspeed.pipe import PipelineModule
from launch import told_by

import ds_adacc
from ds_adacc.config import ConfigError

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]
SERVED = ("qkv", "fc1", "fc2")
SECTION = {"adacc": {"compact": {}}}


def by_name(cases):
    return pytest.mark.parametrize("name", [further(label(case)) if case.further else label(case) for case in cases])


def stage_of(name):
    return int(name.split()[0])


ranks = told_by("compact_worker", values_of="name", seconds=380)


@by_name(EXACT)
def test_weights_are_those_of_the_reference_at_every_step(ranks, name):
    for rank in ranks:
        run = rank["exact"][name]
        assert len(run["errors"]) == STEPS
        assert max(run["errors"]) < 2e-6
        assert run["moved"] > 0.01
        assert len(set(run["rates"])) > 1  # the schedule's rate decays the weights


@by_name((*EXACT, *ROUNDED))
def test_the_optimizer_has_r_numbers_for_n_of_each_served_weight(ranks, name):
    """The bytes of the engine's buffers, counted: ZeRO shares them out, and pads each group by a few."""
    model = new_model()
    parameters = dict(model.named_parameters())
    served = {n for n in parameters if n.split(".")[-2] in SERVED and n.endswith("weight")}
    expected = sum(p.shape[0] * RANK if n in served else p.numel() for n, p in parameters.items())
    before = sum(parameters[n].numel() for n in served)
    assert sum(parameters[n].shape[0] * RANK for n in served) == sum(
        parameters[n].numel() * RANK // parameters[n].shape[1] for n in served
    )
    runs = [rank["exact" if name in rank["exact"] else "rounded"][name] for rank in ranks]
    counted = sum(run["moments"] for run in runs) / (2 if stage_of(name) == 0 else 1)
    assert expected <= counted < expected + 64 * 27
    assert counted < before  # all of the model, biases and head included, in fewer than the served weights alone


@by_name((*EXACT, *ROUNDED))
def test_proxies_and_their_masters_are_zero_after_a_step(ranks, name):
    assert {rank["exact" if name in rank["exact"] else "rounded"][name]["left"] for rank in ranks} == {0.0}


@by_name(ROUNDED)
def test_in_16_bits_all_weights_train_and_are_the_same_on_all_ranks(ranks, name):
    first, second = (rank["rounded"][name] for rank in ranks)
    assert first["sum"] == second["sum"]
    assert first["finite"]
    overflown = [2] if "fp16" in name else []
    for step, kept in enumerate(first["kept"]):
        served = [each for each in kept if each.split(".")[-2] in SERVED and each.endswith("weight")]
        assert len(served) == (6 if step in overflown else 0)
    assert first["skipped"] == len(overflown)


@by_name(RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(ranks, name):
    for rank in ranks:
        run = rank["resumed"][name]
        assert run["again"] == run["losses"][SAVED_AFTER:]
        assert run["sums"][0] == run["sums"][1]
        assert math.isfinite(sum(map(sum, run["losses"])))


@by_name(RESUMED)
def test_what_is_saved_and_exported_has_the_models_own_names(ranks, name):
    assert ranks[0]["resumed"][name]["exported"] == list(new_model().state_dict())


@by_name(RESUMED)
def test_an_export_without_frozen_parameters_has_the_weights_that_train(ranks, name):
    """One layer is frozen by the user."""
    trained = [each for each in new_model().state_dict() if not each.startswith("blocks.0.fc1.")]
    assert ranks[0]["resumed"][name]["without_frozen"] == trained


def test_checkpoints_of_other_shapes_are_refused_before_anything_is_loaded(ranks):
    for rank in ranks:
        other_rank, without, plain, excluded = rank["refused"]
        assert "has layer 'blocks.0.qkv' of rank 8, and this run has it of rank 4" in other_rank
        assert "was saved with adacc.compact, which this run does not have" in without
        assert "was saved without adacc.compact" in plain
        assert "load_module_only=True" in plain
        assert "exclude_frozen_parameters=True" in excluded


def test_a_checkpoint_of_which_zero_3_would_load_the_compact_layers_alone_is_refused(ranks):
    for rank in ranks:
        said, is_unchanged = rank["module only"]
        assert said.startswith("load_checkpoint(load_module_only=True) loads frozen weights only under ZeRO-3")
        assert is_unchanged


def test_a_plan_that_recomputes_changes_no_bit_under_zero_3(ranks):
    for rank in ranks:
        run, retaining = rank["planned"], rank["exact"]["3 fp32"]
        assert run["losses"] == retaining["losses"]
        assert all(run["replays"])
        assert run["held"] < 0.6 * retaining["held"]


def test_a_block_that_is_frozen_in_the_middle_trains_on_as_deepspeed_has_it(ranks):
    """Without ZeRO AdamW leaves it alone. Under ZeRO it gets a gradient of zeros, and its moments still move it."""
    plain, first, third = (ranks[0]["frozen"][label(case)] for case in FROZEN)
    assert len({step[0] for step in plain[1:]}) == 1
    assert len({step[1] for step in plain}) == len(plain)
    assert len({step[0] for step in first}) == len(first)
    assert torch.allclose(torch.tensor(third), torch.tensor(first), rtol=1e-5)


def test_sgd_with_an_orthonormal_projection_is_sgd(ranks):
    assert 0 < ranks[0]["orthonormal"] < 2e-6


def test_an_existing_engine_is_refused():
    class Engine(deepspeed.DeepSpeedEngine):
        def __init__(self):
            self.config = SECTION

        def __del__(self):
            pass

        def __getattr__(self, name):
            raise AttributeError(name)

    with pytest.raises(ConfigError, match=r"adacc\.compact: it changes what the optimizer trains"):
        ds_adacc.attach(Engine())


@pytest.mark.parametrize(
    ("zero", "what"),
    [
        ({"stage": 3, "offload_param": {"device": "nvme"}}, r"offload_param\.device = 'nvme'"),
        ({"stage": 3, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size"),
        ({"stage": 3, "mics_shard_size": 2}, "mics_shard_size"),
    ],
)
def test_partitions_of_other_kinds_are_refused_before_anything_changes(zero, what):
    model = new_model()
    with pytest.raises(ConfigError, match=f"adacc.compact does not work with zero_optimization.{what}"):
        ds_adacc.initialize(model=model, config={**SECTION, "zero_optimization": zero})
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_pipeline_is_refused(monkeypatch):
    monkeypatch.setattr(PipelineModule, "__init__", lambda self: super(PipelineModule, self).__init__())
    with pytest.raises(ConfigError, match="does not work with a PipelineModule"):
        ds_adacc.initialize(model=PipelineModule(), config=SECTION)


@pytest.mark.parametrize("gives_optimizer", [False, True])
def test_a_model_is_as_it_was_if_no_engine_comes_of_it(gives_optimizer, monkeypatch):
    """A wrong key elsewhere in ds_config stops DeepSpeed when the layers are served already."""
    monkeypatch.setattr(ds_adacc.engine.api, "deepspeed_initialize", _refuse)
    model = new_model()
    before, classes = model.state_dict(keep_vars=True), [type(module) for module in model.modules()]
    optimizer = torch.optim.AdamW(model.parameters()) if gives_optimizer else None
    for _ in range(2):
        with pytest.raises(ValueError, match="a wrong key"):
            ds_adacc.initialize(model=model, optimizer=optimizer, model_parameters=model.parameters(), config=SECTION)
        after = model.state_dict(keep_vars=True)
        assert list(after) == list(before) and all(after[name] is before[name] for name in before)
        assert [type(module) for module in model.modules()] == classes
        assert list(model.buffers()) == [] and all(p.requires_grad for p in model.parameters())
        assert not any("ds_adacc" in name for module in model.modules() for name in vars(module))
        if gives_optimizer:
            (group,) = optimizer.param_groups
            assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))
            assert "compact" not in group


def _refuse(**_):
    raise ValueError("a wrong key")
