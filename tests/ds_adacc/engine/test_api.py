"""`ds_adacc.initialize` on one rank: what it does without a section, what it finds, what it says."""

import inspect

import deepspeed
import pytest
import torch
import transformers
import zoo
from deepspeed.utils import z3_leaf_module
from fake_engine import Engine
from torch import nn
from translator import Translator

import ds_adacc
from ds_adacc import checkpointing, planner
from ds_adacc.config import ConfigError, load
from ds_adacc.engine import api as engine
from ds_adacc.engine import serving
from ds_adacc.engine.adacc import Adacc
from ds_adacc.plan.ranks import Ranks
from ds_adacc.planner import InfeasibleBudget
from ds_adacc.planner.solution import evaluate_uniform
from ds_adacc.profile import codec_maker
from ds_adacc.report.journal import Journal, read
from ds_adacc.runtime.find_blocks import find_blocks
from ds_adacc.runtime.runtime import Runtime
from ds_adacc.runtime.wrap import wrap_blocks


def test_same_signature_as_deepspeed():
    ours, theirs = (inspect.signature(f) for f in (ds_adacc.initialize, deepspeed.initialize))
    assert [(p.name, p.default) for p in ours.parameters.values()] == [
        (p.name, p.default) for p in theirs.parameters.values()
    ]


@pytest.mark.parametrize("config", [{}, {"adacc": {"enabled": False}}])
def test_without_a_section_it_is_deepspeed(monkeypatch, caplog, config, afresh):
    given, model = {}, Translator()
    theirs = Engine(model), None, None, None
    monkeypatch.setattr(engine, "deepspeed_initialize", lambda **arguments: given.update(arguments) or theirs)
    assert ds_adacc.initialize(model=model, config=config) is theirs
    assert given["model"] is model and given["config"] is config
    assert not any("forward" in module.__dict__ for module in model.modules())
    off = 'the "adacc" section of ds_config says "enabled": false'
    why = off if config else 'ds_config has no "adacc" section'
    assert caplog.messages == [f"{why}: ds_adacc does nothing"]


def test_keys_without_a_section_are_named(monkeypatch, caplog):
    monkeypatch.setattr(engine, "deepspeed_initialize", lambda **arguments: (Engine(Translator()), None, None, None))
    ds_adacc.initialize(model=Translator(), config={"codecs": "none", "memory_budget": 0.4, "train_batch_size": 8})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        'ds_config has no "adacc" section: ds_adacc does nothing. Put these keys into one: memory_budget, codecs'
    )


def test_where_the_section_is_that_turns_it_off_is_said(monkeypatch, caplog, afresh):
    monkeypatch.setenv("ADACC_CONFIG", '{"enabled": false}')
    monkeypatch.setattr(engine, "DeepSpeedEngine", Engine)
    existing = Engine(Translator())
    existing.config = {}
    assert ds_adacc.attach(existing) is None
    told = caplog.messages
    assert told == ['the "adacc" section from ADACC_CONFIG says "enabled": false: ds_adacc does nothing']


@pytest.mark.parametrize("is_attached", [False, True])
def test_options_of_deepspeed_s_section_that_have_no_effect_are_told(monkeypatch, caplog, is_attached):
    existing = Engine(model := Translator())
    existing.config = {"adacc": {}, "activation_checkpointing": {"cpu_checkpointing": True}}
    existing.adacc = None
    monkeypatch.setattr(engine, "DeepSpeedEngine", Engine)
    monkeypatch.setattr(engine, "deepspeed_initialize", lambda **_: (existing, None, None, None))
    monkeypatch.setattr(engine, "serve", lambda *_: None)
    with caplog.at_level("INFO", logger="ds_adacc"):
        ds_adacc.attach(existing) if is_attached else ds_adacc.initialize(model=model, config=existing.config)
    (line,) = caplog.messages
    assert " hold: cpu_checkpointing. In place of cpu_checkpointing, have " in line


def test_a_disabled_section_turns_checkpointing_off_unless_it_was_set_up(monkeypatch, afresh):
    monkeypatch.setattr(engine, "deepspeed_initialize", lambda model, **_: (Engine(model), None, None, None))
    x = torch.ones(2, requires_grad=True)
    ds_adacc.initialize(model=Translator(), config={"adacc": {"enabled": False}})
    assert checkpointing.checkpoint(nn.Identity(), x) is x
    assert checkpointing.registry.runtime is None
    checkpointing.configure(None, {"adacc": {"codecs": "none"}})
    ds_adacc.initialize(model=Translator(), config={"adacc": {"enabled": False}})
    assert checkpointing.registry.runtime is not None


def summary(model, wanted):
    return serving._summary(model, find_blocks(model, wanted), 0)


def test_the_blocks_found_are_told():
    model = nn.Sequential(*(zoo.GPTBlock() for _ in range(3)))
    assert summary(model, "auto") == "3 blocks found: 0 to 2 (GPTBlock)"
    assert summary(nn.Sequential(*map(torch.compile, model)), "auto") == "3 blocks found: 0 to 2 (GPTBlock)"
    of_model = summary(zoo.GPTBlock(), ("GPTBlock",))
    assert of_model.startswith("1 block found: the whole model (GPTBlock). A block that is the whole model saves")
    assert summary(nn.Identity(), "auto") == (
        '0 blocks found ("auto" takes layers of one class, two or more in a list). If the model runs its blocks '
        "through ds_adacc.checkpointing, these are planned for. If it does not, list the class names of its layers in "
        "adacc.blocks"
    )
    assert serving._summary(nn.Identity(), {}, 2) == (
        "each range of layers that the pipeline checkpoints is a block (activation_checkpoint_interval = 2), if its "
        "activation_checkpoint_func calls ds_adacc.checkpointing.checkpoint"
    )
    albert = transformers.AlbertModel(transformers.AlbertConfig(hidden_size=8, num_attention_heads=1))
    assert summary(albert, "auto").endswith(
        "in adacc.blocks. If the model runs one of these layers repeatedly, list it: AlbertLayerGroup"
    )
    assert summary(model, ("LayerNorm",)) == (
        '6 blocks found: 0.ln1 to 2.ln2 (LayerNorm). They lie within the repeated layers that "auto" takes (GPTBlock). '
        "What these save outside of the blocks is not planned for, and has no part in memory_budget"
    )


def test_a_bad_section_is_refused_before_anything_is_set_up(monkeypatch):
    monkeypatch.setattr(engine, "deepspeed_initialize", lambda **_: pytest.fail("set up"))
    with pytest.raises(ConfigError, match=r"adacc\.memory_budgett.*memory_budget"):
        ds_adacc.initialize(model=Translator(), config={"adacc": {"memory_budgett": 0.5}})
    monkeypatch.setattr(codec_maker, "why_unusable", {"cuda": "CuPy is not installed"}.get)
    with pytest.raises(ConfigError, match=r"adacc\.backend = 'cuda': .*: CuPy is not installed; or take 'auto'"):
        ds_adacc.initialize(model=Translator(), config={"adacc": {"backend": "cuda"}})
    with pytest.raises(ConfigError, match=r"= \['Expert'\]: .* class 'Expert'; the nearest is 'Experts'"):
        ds_adacc.initialize(model=Translator(), config={"adacc": {"blocks": ["Expert"]}})
    with pytest.raises(
        ConfigError, match="no module of class 'LlamaDecoderLayer'; \"auto\" takes its repeated layers, "
    ):
        ds_adacc.initialize(model=Translator(), config={"adacc": {"blocks": ["LlamaDecoderLayer"]}})


def adacc_for(model, **section):
    config = load({"adacc": {"memory_budget": 0.8, "codecs": "none", "solver": {"max_seconds": 30.0}} | section})
    runtime = Runtime(config, has_engine=True)
    wrap_blocks(find_blocks(model, config.blocks), runtime)
    return Adacc(runtime)


def budget_of(model, *inputs):
    """The bytes of the fraction that `adacc_for` gives a model like this, on such inputs."""
    adacc = adacc_for(model)
    model(*inputs).sum().backward()
    adacc.end_step()
    return adacc.runtime.controller.plan.budget


def train(adacc, model, times):
    for time in times:
        model(torch.randn(2, time, zoo.WIDTH, requires_grad=True)).sum().backward()
        adacc.end_step()


def test_the_table_says_what_was_planned_and_observed(caplog):
    model = nn.Sequential(*(zoo.GPTBlock() for _ in range(3)))
    adacc = adacc_for(model)
    with caplog.at_level("INFO", logger="ds_adacc"):
        train(adacc, model, (9, 9, 9))
    (table,) = [line for line in caplog.messages if "plan (first step" in line]
    plan = adacc.runtime.controller.plan
    assert adacc.observed_held_bytes == adacc.planned_held_bytes == plan.groups[0].solution.held[0]
    for word in ("3 calls held at once", "recompute", "drop mask", "peak: planned", "observed", "solved in"):
        assert word in table


def test_a_budget_that_nothing_fits_is_in_the_journal_too(tmp_path):
    """The console may be gone when the user asks why the run has ended."""
    path = tmp_path / "run.jsonl"
    model, config = nn.Sequential(*(zoo.GPTBlock() for _ in range(3))), load({"adacc": {"memory_budget": "1KiB"}})
    runtime = Runtime(config, has_engine=True, journal=Journal(path))
    wrap_blocks(find_blocks(model, config.blocks), runtime)
    with pytest.raises(InfeasibleBudget) as refusal:
        train(Adacc(runtime), model, (9,))
    (event,) = [each for each in read(path) if each["event"] == "refused"]
    assert event["text"] == str(refusal.value)
    assert '"memory_budget": ' in event["text"]


def test_one_warning_when_no_block_was_run(caplog):
    model = nn.Linear(4, 4)
    adacc = adacc_for(model)
    with caplog.at_level("WARNING", logger="ds_adacc"):
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            adacc.end_step()
    assert len([line for line in caplog.messages if "matched no block" in line]) == 1


def test_a_program_that_never_steps_is_told_so_once(caplog):
    adacc = adacc_for(nn.Linear(4, 4))
    for _ in range(90):
        adacc.end_backward(micro_batches=2)
    (record,) = caplog.records
    assert record.getMessage().startswith("no step has come in 40 backward passes. Until engine.step() has run the ")


def test_a_program_of_many_passes_a_step_is_told_nothing(caplog):
    """DeepSpeed lets it accumulate as it likes."""
    adacc = adacc_for(nn.Linear(4, 4))
    for _ in range(19):
        adacc.end_backward(micro_batches=1)
    adacc.end_step()
    caplog.clear()
    for _ in range(90):
        adacc.end_backward(micro_batches=1)
    assert not caplog.text


def test_a_rank_that_runs_no_block_votes_with_the_others(monkeypatch):
    adacc = adacc_for(nn.Linear(4, 4))
    votes = []
    monkeypatch.setattr(Ranks, "size", 2)
    adacc.runtime.controller.ranks.any = lambda flag: votes.append(flag) or True
    adacc.runtime.controller.planning.plan_pending = lambda _: votes.append("planned")
    adacc.end_step()
    assert votes == [False, False, "planned"]


def test_another_warning_when_blocks_were_found_but_not_run(caplog):
    runtime, blocks = adacc_for(nn.Linear(4, 4)).runtime, {"layers.0": nn.Identity(), "layers.1": nn.Identity()}
    wrap_blocks(blocks, runtime)
    adacc = Adacc(runtime, blocks)
    with caplog.at_level("WARNING", logger="ds_adacc"):
        adacc.end_step()
        assert "none of the 2 blocks found" in caplog.text
        del blocks["layers.0"]
        Adacc(runtime, blocks).end_step()
    assert "the only block found, layers.1, never ran in training" in caplog.text


@pytest.mark.parametrize("zero", [True, {"stage": "auto"}])
def test_a_stage_that_cannot_be_read_is_named(monkeypatch, zero):
    monkeypatch.setattr(engine, "deepspeed_initialize", lambda **_: pytest.fail("set up"))
    with pytest.raises(ConfigError, match=r"zero_optimization = .*stage is 0, 1, 2 or 3"):
        ds_adacc.initialize(model=Translator(), config={"adacc": {}, "zero_optimization": zero})


class Meeting(nn.Module):
    """Two block types that run together, one of them at a length of its own."""

    def __init__(self):
        super().__init__()
        self.readers = nn.ModuleList(zoo.GPTBlock() for _ in range(2))
        self.writers = nn.ModuleList(zoo.BertBlock() for _ in range(2))

    def forward(self, x):
        y = x[:, :5].contiguous()
        for block in self.readers:
            x = block(x)
        for block in self.writers:
            y = block(y)
        return x.sum() + y.sum()


def test_a_new_shape_shares_the_budget_with_what_runs_beside_it():
    adacc = adacc_for(model := Meeting())
    decisions = []
    for time in (9, 9, 12, 12):
        model(torch.randn(2, time, zoo.WIDTH, requires_grad=True)).backward()
        adacc.end_step()
        if adacc.runtime.controller.plan not in decisions:
            decisions.append(adacc.runtime.controller.plan)
    (plan,) = decisions  # the new size takes over its policies
    assert [block_type.count for block_type in plan.block_types] == [2, 2]
    assert not adacc.runtime.agreement.undecided
    assert adacc.observed_held_bytes == adacc.planned_held_bytes > 0


def test_policies_in_force_stay_where_a_new_shape_does_not_fit(caplog):
    budget = budget_of(Meeting(), torch.randn(2, 9, zoo.WIDTH, requires_grad=True))
    adacc = adacc_for(model := Meeting(), memory_budget=f"{budget}B")
    for time in (9, 9):
        model(torch.randn(2, time, zoo.WIDTH, requires_grad=True)).backward()
        adacc.end_step()
    before = adacc.runtime.controller.plan.policies
    with caplog.at_level("WARNING", logger="ds_adacc"):
        model(torch.randn(2, 64, zoo.WIDTH, requires_grad=True)).backward()
        adacc.end_step()
    after = (plan := adacc.runtime.controller.plan).policies
    assert "New blocks take the leanest policies found, and the others keep theirs, with a peak of" in caplog.text
    (new,) = (block_type for block_type in plan.block_types if block_type.name not in before)
    assert before.items() <= after.items()
    recomputed = evaluate_uniform(planner.Problem((new,)), [planner.recompute_policy(new.profile)])
    assert budget < plan.peak < recomputed.peak
    for time in (64, 64):
        model(torch.randn(2, time, zoo.WIDTH, requires_grad=True)).backward()
        adacc.end_step()
    assert adacc.runtime.controller.plan is plan
    model(torch.randn(2, 12, zoo.WIDTH, requires_grad=True)).backward()
    adacc.end_step()
    assert adacc.runtime.controller.plan is plan
    assert not adacc.runtime.agreement.undecided, "policies that fit are found without a plan"
    assert adacc.runtime.agreement.budget.limit == budget


class Twins(nn.Module):
    """Two block types, of which a call may run either or both."""

    def __init__(self):
        super().__init__()
        self.readers = nn.ModuleList(zoo.GPTBlock() for _ in range(2))
        self.writers = nn.ModuleList(zoo.GPTBlock(dropout=0.0) for _ in range(2))

    def forward(self, x, which):
        return sum(run(x, getattr(self, name)) for name in which)


def run(x, blocks):
    for block in blocks:
        x = block(x)
    return x.sum()


def test_kinds_that_meet_later_are_planned_for_together():
    adacc = adacc_for(model := Twins())
    seen = []
    for which in ("readers",), ("writers",), ("readers", "writers"), ("readers", "writers"), ("readers",):
        model(torch.randn(2, 9, zoo.WIDTH, requires_grad=True), which).backward()
        adacc.end_step()
        seen.append(adacc.runtime.controller.plan)
    # Where both run, the first writer is given what the first reader holds already: that is a type of its own.
    assert [len(plan.block_types) for plan in seen] == [1, 1, 3, 3, 3]
    assert seen[2] is seen[3] is seen[4]
    assert seen[2].peak <= seen[2].budget
    assert seen[0].budget < seen[2].budget, "a fraction is of the largest peak without checkpointing so far"


def test_micro_batches_of_a_step_have_the_whole_budget_each():
    adacc = adacc_for(model := nn.Sequential(*(zoo.GPTBlock() for _ in range(3))))
    for time in (9, 12):
        model(torch.randn(2, time, zoo.WIDTH, requires_grad=True)).sum().backward()
        adacc.runtime.controller.end_backward()
    adacc.end_step()
    plan, agreement = adacc.runtime.controller.plan, adacc.runtime.agreement
    (longer,) = plan.block_types
    (shorter,) = (agreement.type_plans[name].spec for name in agreement.origins)
    assert longer.count == shorter.count == 3
    for each in (longer, shorter):
        retained = planner.Problem((each,)), [planner.retain_policy(each.profile)]
        assert evaluate_uniform(*retained).peak <= plan.without


@pytest.mark.parametrize("stage", [0, 3])
def test_an_initialize_that_fails_leaves_the_model_to_the_engine_that_runs_it(monkeypatch, stage):
    adacc_for(model := Translator())
    blocks = [module for module in model.modules() if hasattr(module.forward, "covered")]
    before = [(block.forward, len(block._forward_pre_hooks), z3_leaf_module(block)) for block in blocks]

    def fail(**_):
        marked = [block for block in blocks if z3_leaf_module(block)]
        assert len(marked) == (3 if stage == 3 else 0)
        raise AssertionError("train_batch_size is wrong")

    monkeypatch.setattr(engine, "deepspeed_initialize", fail)
    with pytest.raises(AssertionError, match="train_batch_size is wrong"):
        ds_adacc.initialize(model=model, config={"adacc": {}, "zero_optimization": {"stage": stage}})
    assert len(blocks) == 5
    assert [(block.forward, len(block._forward_pre_hooks), z3_leaf_module(block)) for block in blocks] == before


def test_an_engine_that_could_not_be_served_can_be_served_later(monkeypatch):
    served = Engine(Translator())
    section = load({"adacc": {}})
    blocks = find_blocks(served.module, "auto")
    plain = [block.forward for block in blocks.values()]
    checkpoints = {"gradient_checkpointing": True, "_gradient_checkpointing_func": torch.utils.checkpoint.checkpoint}
    for block in blocks.values():
        vars(block).update(checkpoints)
    checkpointing.reset()
    with pytest.raises(AttributeError):
        serving.serve(served, section, blocks)
    assert not hasattr(served, "adacc")
    assert all(vars(block).items() >= checkpoints.items() for block in blocks.values())
    assert not checkpointing.registry.has_engines
    assert "backward" not in vars(served)
    assert [block.forward for block in blocks.values()] == plain
    monkeypatch.setattr(serving, "patch_engine", lambda *_: None)
    serving.serve(served, section, blocks)
    assert served.adacc.config is section
    assert all(hasattr(block.forward, "covered") for block in blocks.values())
