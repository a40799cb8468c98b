"""`ds_adacc.checkpointing` is `deepspeed.checkpointing`, name by name: signatures, forms of outputs, meaning."""

import copy
import functools
import gc
import inspect
import json
import types
import weakref

import deepspeed
import pytest
import torch
import zoo
from replayed import replayed
from torch import nn

from ds_adacc import checkpointing
from ds_adacc.config import ConfigError, load
from ds_adacc.config.activation_checkpointing import Options
from ds_adacc.execute.input_placement import PARTITION, InputPlacement
from ds_adacc.plan.placed_inputs import with_placed_inputs
from ds_adacc.profile import codec_maker
from ds_adacc.runtime.runtime import Runtime

LOSSLESS = {"memory_budget": 0.8, "codecs": "none", "solver": {"max_seconds": 30.0}}
WIDTH = 20


pytestmark = pytest.mark.usefixtures("afresh")


CHECKPOINT = checkpointing.checkpoint


def entry_points():
    def through_the_function(function, *args):
        outputs = []
        checkpointing.CheckpointFunction.apply(function, outputs, *args)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return [CHECKPOINT, checkpointing.non_reentrant_checkpoint, through_the_function]


# -- names and signatures

NAMES = (
    "configure",
    "is_configured",
    "checkpoint",
    "non_reentrant_checkpoint",
    "reset",
    "set_num_layers",
    "partition_activations_in_checkpoint",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "get_cuda_rng_tracker",
    "CudaRNGStatesTracker",
)


@pytest.mark.parametrize("name", NAMES)
def test_same_signatures(name):
    ours, theirs = (inspect.signature(getattr(module, name)) for module in (checkpointing, deepspeed.checkpointing))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_every_name_is_there():
    assert {*NAMES, "CheckpointFunction"} <= set(checkpointing.__all__) <= {*dir(checkpointing), *NAMES}
    with pytest.raises(AttributeError, match="no attribute 'checkpiont'"):
        _ = checkpointing.checkpiont


def test_the_random_states_are_deepspeeds_own():
    # gpt-neox, and others that come from Megatron, read the last three where they read the rest
    private = ("_CUDA_RNG_STATE_TRACKER", "_MODEL_PARALLEL_RNG_TRACKER_NAME", "_set_cuda_rng_state")
    for name in (*NAMES[-4:], *private):
        assert getattr(checkpointing, name) is getattr(deepspeed.checkpointing, name)


# -- what DeepSpeed's unit tests ask for, plain and checkpointed beside each other


class Masked(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, mask):
        return super().forward(x) * mask.type_as(x)


class MaskedAndMask(Masked):
    def forward(self, x, mask):
        return super().forward(x, mask), mask


class MoreOutputs(Masked):
    def forward(self, x, mask):
        return x.clone().detach() * 1.38, super().forward(x, mask), mask


class Ignoring(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, ignored):
        return super().forward(x)


class Returning(nn.Linear):
    def __init__(self, also):
        super().__init__(WIDTH, WIDTH)
        self.also = also

    def forward(self, x):
        return super().forward(x), self.also


def computed(module, inputs, call=None):
    """Outputs and gradients of a copy of the module on copies of the inputs."""
    module, inputs = copy.deepcopy(module), copy.deepcopy(inputs)
    outputs = module(*inputs) if call is None else call(module, *inputs)
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(o.sum() for o in several if isinstance(o, torch.Tensor) and o.requires_grad).backward()
    gradients = [p.grad for p in module.parameters()]
    return outputs, gradients, [i.grad for i in inputs if isinstance(i, torch.Tensor)]


def cases():
    torch.manual_seed(0)
    bools = torch.randn(WIDTH) > 0
    for mask in (bools, bools.float()):
        yield Masked(), (mask,)
        yield MaskedAndMask(), (mask,)
        yield MoreOutputs(), (mask,)
    for thing in (None, 2, True, (None, 2.5), (None, True, torch.randn(WIDTH)), (torch.randn(WIDTH), 2.5)):
        yield Ignoring(), (thing,)
        yield Returning(thing), ()
    yield nn.Linear(WIDTH, WIDTH), ()


@pytest.mark.parametrize(("call", "requires_grad"), [*((call, True) for call in entry_points()), (CHECKPOINT, False)])
def test_outputs_and_gradients_are_those_without(call, requires_grad):
    checkpointing.configure(None, {"adacc": {**LOSSLESS, "memory_budget": 1.0}})
    for module, others in list(cases())[:: 1 if call is CHECKPOINT else 3]:
        x = torch.rand(WIDTH).requires_grad_(requires_grad)
        for _ in range(2):  # recorded, all that can be recomputed; then as planned
            zoo.assert_same(computed(module, (x, *others)), computed(module, (x, *others), call))


def test_keyword_arguments_get_gradients():
    def function(value, *, scale, offset):
        return value * scale + offset

    value, scale = (torch.randn(WIDTH, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(function(value, scale=scale, offset=1.5).exp().sum(), (value, scale))
    output = checkpointing.checkpoint(function, value, scale=scale, offset=1.5)
    zoo.assert_same(expected, torch.autograd.grad(output.exp().sum(), (value, scale)))


@pytest.mark.parametrize(
    ("returned", "form"),
    [
        ([1, "a"], (1, "a")),
        ((None,), None),
        ([7], 7),
        ((), ()),
        (None, None),
        ({"a": 1}, {"a": 1}),
        (5, 5),
        (((1, 2), 3), ((1, 2), 3)),
    ],
)
def test_the_form_of_outputs(returned, form):
    zoo.assert_same(form, checkpointing.checkpoint(lambda x: returned, torch.ones(2, requires_grad=True)))


@pytest.mark.parametrize("returned", [lambda x: x * 2, lambda x: (x * 2, None, x * 3), lambda x: [x * 2, "a"]])
def test_forms_are_deepspeeds(returned):
    x = torch.ones(2, requires_grad=True)
    zoo.assert_same(deepspeed.checkpointing.checkpoint(returned, x), checkpointing.checkpoint(returned, x))
    given, made = [], []
    theirs = deepspeed.checkpointing.CheckpointFunction.apply(returned, given, x)
    zoo.assert_same(theirs, checkpointing.CheckpointFunction.apply(returned, made, x))
    zoo.assert_same(given, made)


def test_an_input_may_be_used_by_several_blocks():
    checkpointing.configure(None, {"adacc": {**LOSSLESS, "memory_budget": 1.0}}, checkpoint_in_cpu=True)
    hidden, shared = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def layer(a, b):
        return a * b + b

    def run(call):
        return torch.autograd.grad(call(layer, call(layer, hidden, shared), shared).sum(), (hidden, shared))

    expected = run(lambda function, *args: function(*args))
    for _ in range(3):
        zoo.assert_same(expected, run(checkpointing.checkpoint))


# -- Megatron-style programs


def test_closures_made_anew_train_as_without():
    checkpointing.configure(None, {"adacc": {**LOSSLESS, "memory_budget": 0.6}})
    torch.manual_seed(0)
    layers = nn.ModuleList(zoo.GPTBlock() for _ in range(4))

    def forward(x, call):
        def custom(start, end):
            def custom_forward(*inputs):
                (y,) = inputs
                for layer in layers[start:end]:
                    y = layer(y)
                return y

            return custom_forward

        for start in range(0, 4, 2):
            x = call(custom(start, start + 2), x)
            checkpointing.reset()  # as programs do at each step; it is no loss of plans
        return x

    for _ in range(5):
        x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
        plain = zoo.gradients(layers, (x,), {}, lambda x: forward(x, lambda function, x: function(x)))
        ours = zoo.gradients(layers, (x,), {}, lambda x: forward(x, checkpointing.checkpoint))
        zoo.assert_same_bits(plain, ours)
    runtime = checkpointing.registry.runtime
    assert runtime.recordings == 2 and runtime.controller.plan is not None
    assert any(replayed(runtime.controller.plan))


class Mpu:
    """Of one rank."""

    def __getattr__(self, name):
        return lambda: {"rank": 0, "world_size": 1}.get(name.removeprefix("get_model_parallel_"), 0)


def test_a_fork_of_random_states_within_a_block():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.Linear(zoo.WIDTH, zoo.WIDTH)

        def forward(self, x):
            h = nn.functional.gelu(self.fc1(x))
            with checkpointing.get_cuda_rng_tracker().fork():
                h = nn.functional.dropout(h, 0.4)
            return self.fc2(nn.functional.dropout(h, 0.1))

    tracker = checkpointing.get_cuda_rng_tracker()
    blocks = nn.ModuleList(Dropping() for _ in range(3))
    checkpointing.configure(None, {"adacc": {**LOSSLESS, "memory_budget": 0.9}})

    def steps(call):
        tracker.reset()
        tracker.add("model-parallel-rng", 123)
        torch.manual_seed(7)
        for _ in range(4):
            x = torch.randn(2, 9, zoo.WIDTH, requires_grad=True)
            h = functools.reduce(lambda h, block: call(block, h), blocks, x)
            yield torch.autograd.grad(h.square().sum(), [x, *blocks.parameters()])

    try:
        zoo.assert_same(list(steps(lambda block, h: block(h))), list(steps(checkpointing.checkpoint)))
    finally:
        tracker.reset()
    assert checkpointing.registry.runtime.controller.plan is not None


def test_the_model_parallel_unit_is_known_to_deepspeeds_functions(monkeypatch):
    monkeypatch.setattr(deepspeed.checkpointing, "mpu", None)
    unit = Mpu()
    checkpointing.configure(unit, {"adacc": LOSSLESS})
    assert deepspeed.checkpointing.mpu is unit
    checkpointing.configure(None, {"adacc": LOSSLESS})
    assert checkpointing.registry.mpu is unit


# -- configuration


def test_configured_by_a_file(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 1, "adacc": LOSSLESS}))
    assert not checkpointing.is_configured()
    checkpointing.configure(None, deepspeed_config=str(path))
    assert checkpointing.is_configured()
    block, args, kwargs = zoo.example("llama")
    for _ in range(3):
        zoo.assert_exact(block, args, kwargs, functools.partial(checkpointing.checkpoint, block))
    checkpointing.reset()
    assert checkpointing.is_configured() and checkpointing.registry.runtime.controller.plan is not None
    checkpointing.registry.reset()
    assert not checkpointing.is_configured()


@pytest.mark.parametrize("configure", [None, {}, {"train_batch_size": 1, "activation_checkpointing": {}}])
def test_without_a_section_the_defaults_are_in_force_and_one_line_says_so(configure, caplog):
    with caplog.at_level("INFO", logger="ds_adacc"):
        if configure is not None:
            checkpointing.configure(None, configure)
        for _ in range(3):
            checkpointing.checkpoint(nn.Identity(), torch.ones(2, requires_grad=True)).sum().backward()
    assert checkpointing.is_configured() == (configure is not None)
    assert checkpointing.registry.runtime.config == load({"adacc": {"codecs": "none"}})
    assert len([line for line in caplog.messages if 'no "adacc" section: its defaults are in force' in line]) == 1


def test_a_disabled_section_just_calls(caplog):
    caplog.set_level("INFO", logger="ds_adacc")
    checkpointing.configure(None, {"adacc": {"enabled": False}})
    told = 'the "adacc" section of ds_config says "enabled": false: ds_adacc does nothing'
    assert caplog.messages == [told]
    assert checkpointing.is_configured() and checkpointing.registry.runtime is None
    assert checkpointing.checkpoint(lambda x: [x], 3) == 3
    checkpointing.partition_activations_in_checkpoint(True)
    assert checkpointing.registry.runtime is None


def test_arguments_come_before_the_section():
    section = {"partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 3, "unknown": 1}
    options = Options.of({"activation_checkpointing": section})
    assert options == Options(partition_activations=True, cpu_checkpointing=True, number_checkpoints=3)
    changed = options.overridden(partition_activations=False, number_checkpoints=None, profile=True)
    assert changed == Options(cpu_checkpointing=True, number_checkpoints=3, profile=True)
    assert changed.without_effect == ("number_checkpoints", "profile")
    with pytest.raises(ConfigError, match="activation_checkpointing = 3: must be an object"):
        checkpointing.configure(None, {"activation_checkpointing": 3})


def test_what_has_no_effect_is_named(caplog):
    with caplog.at_level("INFO", logger="ds_adacc"):
        checkpointing.configure(None, {"adacc": LOSSLESS}, True, True, 4, synchronize=True, profile=False)
        checkpointing.set_num_layers(5)
    told = caplog.messages
    idle = "contiguous_memory_optimization, number_checkpoints, synchronize_checkpoint_boundary"
    assert told == [
        f"activation_checkpointing: ds_adacc ignores {idle}",
        "set_num_layers(5) has no effect: ds_adacc keeps no contiguous buffers",
    ]


def told_of_options(caplog, **section):
    caplog.clear()
    with caplog.at_level("INFO", logger="ds_adacc"):
        checkpointing.log_options({"adacc": LOSSLESS, "activation_checkpointing": section})
    return caplog.messages


def test_an_engine_says_which_options_of_deepspeed_s_it_does_not_take(caplog):
    assert told_of_options(caplog) == told_of_options(caplog, partition_activations=False, profile=None) == []
    (line,) = told_of_options(caplog, partition_activations=True, cpu_checkpointing=True, number_checkpoints=4)
    configure = "call ds_adacc.checkpointing.configure(mpu, ds_config), and"
    assert line == (
        'these keys of "activation_checkpointing" have no effect, as ds_adacc decides what blocks hold: '
        "partition_activations, number_checkpoints, cpu_checkpointing. "
        f"In place of partition_activations, {configure} block inputs are shared among tensor-parallel ranks. "
        'In place of cpu_checkpointing, have "offload": true (the default) in the "adacc" section, and tensors of a '
        f"CUDA device wait in host memory where that pays; or {configure} all retained block inputs wait there"
    )


@pytest.mark.parametrize("by_an_engine", [True, False])
def test_keys_that_deepspeed_ignores_without_a_word_are_named(caplog, by_an_engine):
    section = {"partition_activation": True, "profile": False}
    tell = checkpointing.log_options if by_an_engine else functools.partial(checkpointing.configure, None)
    tell({"adacc": LOSSLESS, "activation_checkpointing": section})
    valid = "'partition_activations', 'contiguous_memory_optimization', 'number_checkpoints', 'cpu_checkpointing', "
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "activation_checkpointing.partition_activation = True: unknown key, which has no effect; did you mean "
        f"'partition_activations'? (valid: {valid}'synchronize_checkpoint_boundary', 'profile')"
    ]


def test_options_that_configure_has_set_are_taken(caplog):
    checkpointing.configure(None, {"adacc": LOSSLESS, "activation_checkpointing": {"cpu_checkpointing": True}})
    assert told_of_options(caplog, cpu_checkpointing=True) == []
    (line,) = told_of_options(caplog, cpu_checkpointing=True, profile=True)
    assert line.endswith(" hold: profile. In place of profile, see the seconds in `ds_adacc report`")


def test_contiguous_buffers_are_refused_as_deepspeed_refuses_them():
    with pytest.raises(AssertionError, match="number of layers"):
        checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True)
    with pytest.raises(AssertionError, match="only available with partitioned activations"):
        checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=3)
    assert not checkpointing.is_configured()


def test_an_engine_goes_on_serving():
    runtime = Runtime(load({"adacc": LOSSLESS}), has_engine=True)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    checkpointing.registry.register(runtime)
    assert checkpointing.is_configured() and runtime.agreement.inputs == InputPlacement(on_host=True)
    checkpointing.configure(None, {"activation_checkpointing": {}})
    assert checkpointing.registry.runtime is runtime and runtime.agreement.inputs == InputPlacement()


def test_an_engine_that_is_gone_leaves_everything_as_before():
    runtime = Runtime(load({"adacc": LOSSLESS}), has_engine=True)
    checkpointing.registry.register(runtime)
    block, args, kwargs = zoo.example("llama")
    checkpointing.checkpoint(block, *args, **kwargs).sum().backward()
    its, parameter = weakref.ref(runtime), weakref.ref(block.q.weight)
    assert checkpointing.is_configured()
    del runtime, block, args, kwargs
    gc.collect()
    assert its() is None and parameter() is None
    assert not checkpointing.is_configured() and checkpointing.registry.runtime is None
    checkpointing.configure(None, {"adacc": LOSSLESS})
    assert checkpointing.registry.runtime is not None


def test_what_was_configured_comes_into_force_once_the_engine_is_gone():
    unit, section = Mpu(), {**LOSSLESS, "memory_budget": 0.4}
    runtime = Runtime(load({"adacc": LOSSLESS}), has_engine=True)
    checkpointing.registry.register(runtime)
    checkpointing.configure(unit, {"adacc": section}, checkpoint_in_cpu=True)
    assert checkpointing.registry.runtime is runtime and runtime.agreement.inputs == InputPlacement(on_host=True)
    del runtime
    gc.collect()
    own = checkpointing.registry.runtime
    assert checkpointing.is_configured() and own.config == load({"adacc": section})
    assert own.agreement.inputs == InputPlacement(on_host=True) and checkpointing.registry.mpu is unit


def test_an_engine_that_the_program_has_dropped_does_not_serve_beyond_configure(uncollected):
    runtime, section = Runtime(load({"adacc": LOSSLESS}), has_engine=True), {**LOSSLESS, "memory_budget": 0.4}
    runtime.engine = runtime  # an engine is part of cycles
    checkpointing.registry.register(runtime)
    del runtime
    assert checkpointing.registry.has_engines
    checkpointing.configure(None, {"adacc": section})
    assert checkpointing.registry.runtime.config == load({"adacc": section})


class Unready:
    """A model-parallel unit whose groups are not there yet."""

    def get_model_parallel_group(self):
        raise AssertionError("model parallel group is not initialized")


@pytest.mark.parametrize("has_engine", [False, True])
def test_a_configure_that_fails_changes_nothing(has_engine, monkeypatch):
    monkeypatch.setattr(deepspeed.checkpointing, "mpu", None)
    checkpointing.configure(None, {"adacc": LOSSLESS})
    engines = [Runtime(load({"adacc": LOSSLESS}), has_engine=True)] if has_engine else []
    for runtime in engines:
        checkpointing.registry.register(runtime)
    before = dict(vars(checkpointing.registry))
    other = {"adacc": {**LOSSLESS, "memory_budget": 0.4}}
    with pytest.raises(AssertionError, match="group is not initialized"):
        checkpointing.configure(Unready(), other, partition_activations=True, checkpoint_in_cpu=True)
    with pytest.raises(ConfigError, match="unknown key"):
        checkpointing.configure(Unready(), {"adacc": {"memory": 0.5}})
    assert vars(checkpointing.registry) == before
    assert deepspeed.checkpointing.mpu is None
    unready = Unready()
    checkpointing.configure(unready, other)
    before = dict(vars(checkpointing.registry))
    with pytest.raises(AssertionError, match="group is not initialized"):
        checkpointing.partition_activations_in_checkpoint(True)
    assert vars(checkpointing.registry) == before


def test_one_group_serves_each_configure(monkeypatch):
    made, group = [], object()
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks, **_: made.append(ranks) or object())
    unit = types.SimpleNamespace(get_model_parallel_group=lambda: group)
    for budget in (0.8, 0.4):
        checkpointing.configure(unit, {"adacc": {**LOSSLESS, "memory_budget": budget}}, partition_activations=True)
        checkpointing.partition_activations_in_checkpoint(False)
        checkpointing.partition_activations_in_checkpoint(True)
    assert made == [[0, 1]] and checkpointing.registry.runtime.controller.ranks.size == 2
    checkpointing.configure(None, {"adacc": {**LOSSLESS, "solver": {"max_seconds": 60}}}, partition_activations=True)
    assert len(made) == 2, "whose timeout is longer"


def test_codecs_that_cannot_run_here_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(codec_maker, "why_unusable", {"cuda": "CuPy is not installed"}.get)
    with pytest.raises(ConfigError, match=r"adacc\.backend = 'cuda': .*: CuPy is not installed; or take 'auto'"):
        checkpointing.configure(None, {"adacc": {"backend": "cuda"}})
    assert not checkpointing.is_configured()


def test_inputs_are_placed_by_what_they_are(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    block, args, kwargs = zoo.example("llama")
    runtime = Runtime(load({"adacc": LOSSLESS}))
    runtime.checkpoint(block, *args, **kwargs)
    (block_type,) = runtime.agreement.known_types.values()
    shared, alone = InputPlacement(group=object()), InputPlacement(on_host=True)
    stores = [shared.store(value) for value in block_type.recording.values]
    assert stores[0] == PARTITION and set(stores[1:]) == {"retain"}  # rope and mask stay with the caller
    assert {alone.store(value) for value in block_type.recording.values} == {
        "retain"
    }  # on the CPU they are in host memory
    whole = block_type.profile.graph
    counted = with_placed_inputs(block_type.profile, block_type.recording, shared).graph
    size = whole.values[0].nbytes
    assert counted.values[0].nbytes == size // 2 and counted.values[1:] == whole.values[1:]
    assert counted.forward_overhead == whole.forward_overhead + size // 2
    assert [e.gradient_bytes for e in counted.events] == [e.gradient_bytes + size for e in whole.events]
