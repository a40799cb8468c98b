import base64
import json

import pydantic
import pytest
from deepspeed.runtime import constants

from ds_adacc.config import (
    AdaccConfig,
    CompactConfig,
    ConfigError,
    MemoryBudget,
    codecs_for,
    load,
    read,
)
from ds_adacc.config.presets import ROLES, UNBOUNDED
from ds_adacc.config.section import RectifierConfig, SolverConfig
from ds_adacc.kernels import CODECS

INT4_CODECS = ", ".join(repr(name) for name in CODECS if name != "bits")
ALL_ROLES = (
    "'block_input', 'linear', 'layernorm', 'gelu', 'query', 'key', 'value', 'attention', 'softmax', 'score', "
    "'dropout_mask', 'statistic', 'other'"
)
TRACKED = ("linear", "layernorm", "gelu", "query", "key", "value")
BOUND = "must be from 1e-9 to 1e9, or null; to allow no error, set 'codecs' to 'none'"
ALL_KEYS = (
    "'enabled', 'blocks', 'memory_budget', 'codecs', 'max_gradient_error', 'offload', 'group_size', 'scale', "
    "'rounding', 'zscore_threshold', 'rectifier', 'solver', 'compact', 'backend'"
)


def errors(section, **document):
    with pytest.raises(ConfigError) as error:
        load({"adacc": section, **document})
    return str(error.value).splitlines()


def test_defaults_of_compact():
    assert load({"adacc": {"compact": {}}}).compact == CompactConfig(
        rank=0.25, update_interval=200, scale=0.25, layers="auto"
    )
    assert load({"adacc": {"compact": None}}).compact is None


def test_compact_takes_patterns_numbers_and_no_interval():
    given = {"rank": 8, "update_interval": None, "scale": {"*.o_proj": 1, "*": 0.5}, "layers": ["*.mlp.*"]}
    compact = load({"adacc": {"compact": given}}).compact
    assert compact == CompactConfig(
        rank=8, update_interval=None, scale={"*.o_proj": 1.0, "*": 0.5}, layers=("*.mlp.*",)
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rnk": 8}, "adacc.compact.rnk = 8: unknown key; did you mean 'rank'? (valid: 'rank', "),
        ({"rank": 0}, "adacc.compact.rank = 0: must be a fraction of the layer's input features (0 < "),
        ({"rank": 1}, "adacc.compact.rank = 1: must be a fraction"),
        ({"rank": 1.0}, "adacc.compact.rank = 1.0: must be a fraction"),
        ({"rank": 1.5}, "adacc.compact.rank = 1.5: must be a fraction"),
        ({"rank": True}, "adacc.compact.rank = true: must be a fraction"),
        ({"update_interval": 0}, "adacc.compact.update_interval = 0: must be greater than or equal to 1, or null"),
        ({"update_interval": 1.5}, "adacc.compact.update_interval = 1.5: must be an integer, or null"),
        ({"scale": 0}, "adacc.compact.scale = 0: must be a number above 0, or an object of name patterns"),
        ({"scale": {"*.fc1": "x"}}, "adacc.compact.scale.*.fc1 = 'x': must be a number above 0"),
        ({"scale": {}}, "adacc.compact.scale = {}: must name at least one pattern"),
        (
            {"layers": "fc1"},
            "adacc.compact.layers = 'fc1': must be 'auto' or a list of name patterns; did you mean ['fc1']?",
        ),
        (
            {"layers": "AUTO"},
            "adacc.compact.layers = 'AUTO': must be 'auto' or a list of name patterns; did you mean 'auto'?",
        ),
        ({"layers": []}, "adacc.compact.layers = []: must be 'auto' or a list of at least one name pattern"),
        ({"layers": [3]}, "adacc.compact.layers[0] = 3: must be a name pattern"),
        (8, 'adacc.compact = 8: must be an object, such as {"rank": 0.25}, or null'),
        (False, 'adacc.compact = false: must be an object, such as {"rank": 0.25}, or null'),
    ],
)
def test_what_is_wrong_in_compact_is_named(section, message):
    (line,) = errors({"compact": section})
    assert line.startswith(message)


def test_defaults():
    config = load({"adacc": {}, "train_batch_size": 8})
    assert config == AdaccConfig(
        enabled=True,
        blocks="auto",
        memory_budget="auto",
        codecs="auto",
        max_gradient_error=0.1,
        offload=True,
        group_size=128,
        scale="extreme",
        rounding="nearest",
        zscore_threshold=3.0,
        rectifier=RectifierConfig(enabled=True, max_interval=1024, drift=0.10, roles=TRACKED),
        solver=SolverConfig(max_seconds=5.0),
        compact=None,
        backend="auto",
    )
    assert config.memory_budget == MemoryBudget("auto")
    assert config.rectifier.roles == TRACKED
    assert not config.forces_compression


def test_every_key():
    section = {
        "enabled": True,
        "blocks": ["GPTBlock", "T5Block"],
        "memory_budget": "12GiB",
        "codecs": {"linear": ["group", "outlier"], "key": "channel", "other": []},
        "max_gradient_error": 0.05,
        "group_size": 64,
        "scale": "paper",
        "rounding": "stochastic",
        "zscore_threshold": 4,
        "rectifier": {"enabled": False, "max_interval": 1, "drift": 0.5, "roles": []},
        "solver": {"max_seconds": 0.25},
        "backend": "reference",
    }
    config = load({"adacc": section})
    assert config.blocks == ("GPTBlock", "T5Block")
    assert config.codecs == {"linear": ("group", "outlier"), "key": ("channel",), "other": ()}
    assert config.max_gradient_error == 0.05
    assert (config.group_size, config.zscore_threshold, config.backend) == (64, 4.0, "reference")
    assert (config.scale, config.rounding) == ("paper", "stochastic")
    assert config.rectifier == RectifierConfig(enabled=False, max_interval=1, drift=0.5, roles=())
    assert config.solver.max_seconds == 0.25


def test_absent_or_disabled_sections_are_none_but_checked():
    assert load(None) is None
    assert load({}) is None
    assert load({"zero_optimization": {"stage": 3}}) is None
    assert load({"adacc": {"enabled": False}}) is None
    assert errors({"enabled": False, "group_size": 3}) == [
        "adacc.group_size = 3: must be even and at least 2, as two 4-bit codes share a byte; at most 65536"
    ]


def test_nothing_can_be_changed():
    config = load({"adacc": {}})
    for part, key in ((config, "group_size"), (config.rectifier, "drift"), (config.solver, "max_seconds")):
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(part, key, 2)


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        ("auto", MemoryBudget("auto")),
        ("12GiB", MemoryBudget("bytes", 12 * 2**30)),
        ("512MB", MemoryBudget("bytes", 512_000_000)),
        ("1.5 GB", MemoryBudget("bytes", 1_500_000_000)),
        ("1.5gib", MemoryBudget("bytes", 3 * 2**29)),
        (" 2 tb ", MemoryBudget("bytes", 2 * 10**12)),
        ("100 KiB", MemoryBudget("bytes", 102_400)),
        ("7B", MemoryBudget("bytes", 7)),
        ("0.1GB", MemoryBudget("bytes", 100_000_000)),
        (1048576, MemoryBudget("bytes", 1048576)),
        (1.0, MemoryBudget("fraction", 1.0)),
        (0.25, MemoryBudget("fraction", 0.25)),
    ],
)
def test_memory_budget(value, budget):
    parsed = load({"adacc": {"memory_budget": value}}).memory_budget
    assert parsed == budget
    assert isinstance(parsed.amount, float) == (budget.kind == "fraction")


@pytest.mark.parametrize(
    "value",
    [0, -1, 0.0, -0.5, 2.5e9 + 0.5, float("inf"), float("nan"), True, None, [], "", "GiB", "-1GB", "0MB", "0", "1e9B"],
)
def test_budgets_that_are_none(value):
    shown = {"None": "null", "True": "true"}.get(repr(value), repr(value))
    assert errors({"memory_budget": value}) == [
        f"adacc.memory_budget = {shown}: must be 'auto', bytes (an integer, or a string like '12GiB' or '1.5 GB'), "
        "or a fraction (0 < decimal number <= 1)"
    ]


@pytest.mark.parametrize("value", ["0.4", "1.0"])
def test_a_fraction_in_quotes(value):
    (message,) = errors({"memory_budget": value})
    assert message.endswith(f"(0 < decimal number <= 1); did you mean {value}, without quotes?")


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("12", "'12GiB'"),
        ("1.5", "'1.5GiB'"),
        ("596992", "596992, without quotes"),
        ("12G", "'12GB'"),
        ("1.5 gi", "'1.5 giB'"),
        ("AUTO", "'auto'"),
        (12e9, "12000000000"),
    ],
)
def test_a_budget_that_is_nearly_valid(value, meant):
    (message,) = errors({"memory_budget": value})
    assert message.endswith(f"(0 < decimal number <= 1); did you mean {meant}?")


@pytest.mark.parametrize(
    ("value", "meant"),
    [(4.0, "0.4 or '4GiB'"), (1.5, "0.15 or '1.5GiB'"), (40.0, "0.4 or '40GiB'"), (640.0, "'640GiB'")],
)
def test_a_fraction_above_1(value, meant):
    (message,) = errors({"memory_budget": value})
    assert message.endswith(f"(0 < decimal number <= 1); a fraction is at most 1; did you mean {meant}?")


@pytest.mark.parametrize(("value", "fraction"), [("40%", "0.4"), ("12.5 %", "0.125"), ("100%", "1")])
def test_percents(value, fraction):
    (message,) = errors({"memory_budget": value})
    assert message.endswith(f"(0 < decimal number <= 1); did you mean {fraction}?")


def test_the_whole_peak_is_a_fraction_in_a_file_too(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text('{"adacc": {"memory_budget": 1.0}}')
    assert load(file).memory_budget == MemoryBudget("fraction", 1.0)


def test_the_smallest_budget_that_an_error_names_is_valid():
    assert load({"adacc": {"memory_budget": 596_992}}).memory_budget == MemoryBudget("bytes", 596_992)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (2, "the fraction 0.02, or '2GiB'"),
        (40, "the fraction 0.4, or '40GiB'"),
        (100, "the fraction 1.0, or '100GiB'"),
        (101, "'101MiB'"),
        (12000, "'12000MiB'"),
    ],
)
def test_a_whole_number_of_bytes_is_no_fraction(value, meant):
    assert errors({"memory_budget": value}) == [
        f"adacc.memory_budget = {value}: {value} bytes can hold nothing; did you mean {meant}?"
    ]


@pytest.mark.parametrize(
    ("value", "meant"), [("auto ", "'auto'"), (" 0.4 ", "0.4, without quotes"), ("8 G ", "'8 GB'")]
)
def test_blanks_around_a_budget_hide_nothing(value, meant):
    (message,) = errors({"memory_budget": value})
    assert message.endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("switch", ["true", "false"])
def test_a_section_that_is_a_switch_is_told_to_say_the_same(switch):
    assert errors({"rectifier": switch == "true"}) == [
        f'adacc.rectifier = {switch}: must be an object, such as {{"enabled": {switch}}}'
    ]


@pytest.mark.parametrize(
    ("value", "end"),
    [
        ("Block,Attention", "did you mean ['Block', 'Attention']?"),
        ("Block Attention", "did you mean ['Block', 'Attention']?"),
        ("model.layers.Block", "did you mean ['Block']?"),
        ("model.layers", "must be 'auto' or a list of module class names, such as 'LlamaDecoderLayer'"),
        (["model.layers"], "must be the name of a class, such as 'LlamaDecoderLayer'"),
        ("*Block", "must be 'auto' or a list of module class names, such as 'LlamaDecoderLayer'"),
        ([str], "must be the name of a class; did you mean 'str'?"),
        (str, "must be 'auto' or a list of module class names; did you mean ['str']?"),
    ],
)
def test_what_is_proposed_for_blocks_is_valid(value, end):
    (message,) = errors({"blocks": value})
    assert message.endswith(end)


def test_null_in_quotes_is_told_to_lose_them():
    assert errors({"max_gradient_error": "null"}) == [
        "adacc.max_gradient_error = 'null': must be a number, or null; did you mean null, without quotes?"
    ]
    assert errors({"enabled": "null"}) == ["adacc.enabled = 'null': must be true or false"]


@pytest.mark.parametrize("value", [None, False, "none", "off"])
def test_a_role_without_codecs_is_told_how_to_say_so(value):
    (message,) = errors({"codecs": {"linear": value}})
    assert message.endswith("; a role that is left out is never compressed")


def test_a_key_beside_the_section_is_told_to_move_into_it():
    with pytest.raises(ConfigError) as error:
        load({"adacc": {"codecs": "none"}, "memory_budget": 0.4, "train_batch_size": 8})
    assert str(error.value) == "memory_budget: the key belongs within 'adacc'"
    assert load({"memory_budget": 0.4}) is None  # without the section it is not ours


def test_a_choice_of_codecs_beside_the_section_is_not_lost():
    with pytest.raises(ConfigError, match=r"^codecs: the key belongs within 'adacc'$"):
        load({"adacc": {"memory_budget": 0.4}, "codecs": "none"})


def test_what_breaks_a_file_is_said_as_json_says_it(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"adacc": {"enabled": True}}')
    with pytest.raises(ConfigError, match=r"; as JSON: Expecting value: line 1 column 23 \(char 22\)$"):
        load(path)


def test_the_papers_codecs():
    offer = codecs_for(load({"adacc": {"codecs": "paper"}}))
    assert tuple(offer) == ROLES
    for role in ("linear", "layernorm", "gelu", "block_input", "attention", "other"):
        assert offer.pop(role) == ("outlier",)
    for role in ("query", "key", "value"):
        assert offer.pop(role) == ("channel",)
    for role in ("softmax", "score"):
        assert offer.pop(role) == ("asymmetric",)
    assert offer == {"dropout_mask": ("bits",), "statistic": ()}


def test_the_other_presets():
    def offer(codecs):
        return codecs_for(load({"adacc": {"codecs": codecs}}))

    paper = offer("paper")
    assert offer("paper-no-outliers") == {r: ("group",) if c == ("outlier",) else c for r, c in paper.items()}
    assert offer({}) == dict.fromkeys(ROLES, ())
    assert offer("none") == {**offer({}), "dropout_mask": ("bits",)}
    assert offer("quantization") == dict.fromkeys(ROLES, ("token",))
    assert offer({"key": "channel", "gelu": ["group", "asymmetric"]}) == {
        **dict.fromkeys(ROLES, ()),
        "key": ("channel",),
        "gelu": ("group", "asymmetric"),
    }


def test_auto_offers_all_that_suits_a_role():
    offer = codecs_for(load({"adacc": {}}))
    paper = codecs_for(load({"adacc": {"codecs": "paper"}}))
    others = {"outlier": ("group", "asymmetric"), "channel": ("group",), "asymmetric": ("group",)}
    in_four_bits = {role: codecs and (*codecs, *others.get(codecs[0], ())) for role, codecs in paper.items()}
    in_eight = {role: tuple(f"{codec}8" for codec in codecs) for role, codecs in in_four_bits.items()}
    in_eight["dropout_mask"] = ()
    assert offer == {role: codecs + in_eight[role] for role, codecs in in_four_bits.items()}


def test_ablations_have_no_bound_unless_one_is_set():
    bounds = {c: load({"adacc": {"codecs": c}}).max_gradient_error for c in ("auto", "paper", *UNBOUNDED)}
    assert bounds == {"auto": 0.1, "paper": 0.1, "paper-no-outliers": None, "quantization": None}
    assert load({"adacc": {"codecs": "paper-no-outliers", "max_gradient_error": 0.2}}).max_gradient_error == 0.2
    assert load({"adacc": {"max_gradient_error": None}}).max_gradient_error is None


def test_what_compresses_everything_keeps_no_bound():
    assert load({"adacc": {"codecs": "quantization", "max_gradient_error": None}}).max_gradient_error is None
    assert errors({"codecs": "quantization", "max_gradient_error": 0.2}) == [
        "adacc.max_gradient_error = 0.2: must be null with codecs 'quantization', which compresses everything whatever "
        "its error; for a bound, set 'codecs' to 'auto' or 'paper'"
    ]


def test_only_the_quantization_baseline_forces_compression():
    forced = {c: load({"adacc": {"codecs": c}}).forces_compression for c in ("paper", "none", "quantization")}
    assert forced == {"paper": False, "none": False, "quantization": True}
    assert not load({"adacc": {"codecs": dict.fromkeys(ROLES, "token")}}).forces_compression


def test_presets_name_codecs_that_exist():
    for codecs in ("paper", "paper-no-outliers", "none", "quantization", "auto"):
        offers = codecs_for(load({"adacc": {"codecs": codecs}}))
        assert {c for offer in offers.values() for c in offer} <= set(CODECS)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rectifer": {}}, f"adacc.rectifer = {{}}: unknown key; did you mean 'rectifier'? (valid: {ALL_KEYS})"),
        (
            {"rectifier.enabled": False},
            'adacc.rectifier.enabled = false: unknown key; write it as "rectifier": {"enabled": false}',
        ),
        ({"x.yz": 1}, f"adacc.x.yz = 1: unknown key (valid: {ALL_KEYS})"),
        ({"xyz": 1}, f"adacc.xyz = 1: unknown key (valid: {ALL_KEYS})"),
        (
            {"rectifier": {"max_intervall": 8}},
            "adacc.rectifier.max_intervall = 8: unknown key; did you mean 'max_interval'? "
            "(valid: 'enabled', 'max_interval', 'drift', 'roles')",
        ),
        (
            {"solver": {"seconds": 1}},
            "adacc.solver.seconds = 1: unknown key; did you mean 'max_seconds'? (valid: 'max_seconds')",
        ),
        ({"solver": 5}, 'adacc.solver = 5: must be an object, such as {"max_seconds": 10}'),
        ({"rectifier": False}, 'adacc.rectifier = false: must be an object, such as {"enabled": false}'),
        ({"enabled": "yes"}, "adacc.enabled = 'yes': must be true or false"),
        ({"group_size": "128"}, "adacc.group_size = '128': must be an integer; did you mean 128, without quotes?"),
        ({"group_size": True}, "adacc.group_size = true: must be an integer"),
        ({"zscore_threshold": 0}, "adacc.zscore_threshold = 0: must be greater than 0"),
        ({"zscore_threshold": float("inf")}, "adacc.zscore_threshold = inf: must be a finite number"),
        (
            {"max_gradient_error": 0},
            f"adacc.max_gradient_error = 0.0: {BOUND}",
        ),
        (
            {"max_gradient_error": 1e-300},
            f"adacc.max_gradient_error = 1e-300: {BOUND}",
        ),
        (
            {"max_gradient_error": 1e300},
            f"adacc.max_gradient_error = 1e+300: {BOUND}",
        ),
        (
            {"solver": {"max_seconds": 1e10}},
            "adacc.solver.max_seconds = 10000000000.0: must be less than or equal to 1000000",
        ),
        ({None: 1}, f"adacc.None = null: unknown key (valid: {ALL_KEYS})"),
        (
            {"max_gradient_error": float("inf")},
            f"adacc.max_gradient_error = inf: {BOUND}",
        ),
        ({"max_gradient_error": "5%"}, "adacc.max_gradient_error = '5%': must be a number, or null"),
        ({"max_gradient_error": "none"}, "adacc.max_gradient_error = 'none': must be a number, or null"),
        (
            {"max_gradient_error": "0.1"},
            "adacc.max_gradient_error = '0.1': must be a number, or null; did you mean 0.1, without quotes?",
        ),
        ({"solver": {"max_seconds": -1}}, "adacc.solver.max_seconds = -1: must be greater than 0"),
        ({"rectifier": {"drift": 11}}, "adacc.rectifier.drift = 11: must be less than or equal to 10"),
        (
            {"rectifier": {"max_interval": 0}},
            "adacc.rectifier.max_interval = 0: must be greater than or equal to 1",
        ),
        (
            {"rectifier": {"roles": []}},
            "adacc.rectifier.roles = []: must name at least one role; to track none, set 'enabled' to false",
        ),
        ({"rectifier": {"roles": "linear"}}, "adacc.rectifier.roles = 'linear': must be a list of roles"),
        (
            {"rectifier": {"roles": ["gelu", "layer_norm"]}},
            f"adacc.rectifier.roles[1] = 'layer_norm': unknown role; did you mean 'layernorm'? (valid: {ALL_ROLES})",
        ),
        (
            {"codecs": "papers"},
            "adacc.codecs = 'papers': unknown preset; did you mean 'paper'? "
            "(valid: 'auto', 'paper', 'paper-no-outliers', 'quantization', 'none')",
        ),
        (
            {"codecs": "lossless"},
            "adacc.codecs = 'lossless': unknown preset; did you mean 'none'? "
            "(valid: 'auto', 'paper', 'paper-no-outliers', 'quantization', 'none')",
        ),
        (
            {"codecs": "int4"},
            "adacc.codecs = 'int4': unknown preset (valid: 'auto', 'paper', 'paper-no-outliers', 'quantization', "
            "'none'), or an object of roles and their codecs, such as "
            '{"linear": ["outlier", "group"], "key": "channel"}',
        ),
        (
            {"codecs": "bits"},
            "adacc.codecs = 'bits': unknown preset (valid: 'auto', 'paper', 'paper-no-outliers', 'quantization', "
            "'none'); a codec is given by role, as in {'dropout_mask': 'bits'}",
        ),
        (
            {"blocks": "all"},
            "adacc.blocks = 'all': must be 'auto' or a list of module class names; did you mean 'auto'?",
        ),
        (
            {"codecs": ["group"]},
            "adacc.codecs = ['group']: must be one of 'auto', 'paper', 'paper-no-outliers', 'quantization', "
            "'none', or an object of roles and their codecs, such as "
            '{"linear": ["outlier", "group"], "key": "channel"}',
        ),
        (
            {"codecs": {"lineer": "group"}},
            f"adacc.codecs.lineer = 'group': unknown role; did you mean 'linear'? (valid: {ALL_ROLES})",
        ),
        (
            {"codecs": {"softmax": "asymetric"}},
            f"adacc.codecs.softmax = 'asymetric': unknown codec; did you mean 'asymmetric'? (valid: {INT4_CODECS})",
        ),
        (
            {"codecs": {"linear": ["outlier", "int4"]}},
            f"adacc.codecs.linear[1] = 'int4': unknown codec (valid: {INT4_CODECS})",
        ),
        ({"codecs": {"linear": 4}}, "adacc.codecs.linear = 4: must be the name of a codec, or a list of names"),
        (
            {"backend": "referense"},
            "adacc.backend = 'referense': unknown backend; did you mean 'reference'? "
            "(valid: 'auto', 'reference', 'cpu', 'cuda')",
        ),
        (
            {"backend": "gpu"},
            "adacc.backend = 'gpu': unknown backend; did you mean 'cuda'? (valid: 'auto', 'reference', 'cpu', 'cuda')",
        ),
        (
            {"backend": "CPU"},
            "adacc.backend = 'CPU': unknown backend; did you mean 'cpu'? (valid: 'auto', 'reference', 'cpu', 'cuda')",
        ),
        (
            {"adacc": {"codecs": "none"}},
            "adacc.adacc = {'codecs': 'none'}: the section lies within itself; remove one of the two 'adacc'",
        ),
        ({"scale": "max"}, "adacc.scale = 'max': unknown scale (valid: 'extreme', 'paper')"),
        (
            {"rounding": "stochastc"},
            "adacc.rounding = 'stochastc': unknown rounding; did you mean 'stochastic'? "
            "(valid: 'nearest', 'stochastic')",
        ),
        (
            {"blocks": "GPTBlock"},
            "adacc.blocks = 'GPTBlock': must be 'auto' or a list of module class names; did you mean ['GPTBlock']?",
        ),
        (
            {"blocks": "Auto"},
            "adacc.blocks = 'Auto': must be 'auto' or a list of module class names; did you mean 'auto'?",
        ),
        (
            {"blocks": []},
            "adacc.blocks = []: must be 'auto' or a list of at least one module class name, such as "
            "'LlamaDecoderLayer'",
        ),
        ({"blocks": ["A", 3]}, "adacc.blocks[1] = 3: must be the name of a class, such as 'LlamaDecoderLayer'"),
        (
            {"blocks": ["model.layers.0"]},
            "adacc.blocks[0] = 'model.layers.0': must be the name of a class, such as 'LlamaDecoderLayer'",
        ),
        (
            {"blocks": ["model.Layer"]},
            "adacc.blocks[0] = 'model.Layer': must be the name of a class; did you mean 'Layer'?",
        ),
        (
            {"codecs": None},
            "adacc.codecs = null: must be one of 'auto', 'paper', 'paper-no-outliers', 'quantization', 'none', or an "
            'object of roles and their codecs, such as {"linear": ["outlier", "group"], "key": "channel"}; did '
            "you mean 'none'?",
        ),
    ],
)
def test_messages_name_the_key_the_value_and_the_nearest_choice(section, message):
    assert errors(section) == [message]


@pytest.mark.parametrize("group_size", [-2, 0, 1, 127])
def test_odd_group_sizes(group_size):
    assert errors({"group_size": group_size})[0].startswith(f"adacc.group_size = {group_size}: must be even")


def test_all_errors_are_listed():
    found = errors(
        {
            "codecs": {"lineer": "group", "gelu": ["x"]},
            "group_size": 3,
            "rectifier": {"max_intervall": 8, "drift": 0, "roles": ["a", "b"]},
        },
        Adacc={},
    )
    assert [line.split(":")[0] for line in found] == [
        "Adacc",
        "adacc.codecs.lineer = 'group'",
        "adacc.codecs.gelu[0] = 'x'",
        "adacc.group_size = 3",
        "adacc.rectifier.drift = 0",
        "adacc.rectifier.roles[0] = 'a'",
        "adacc.rectifier.roles[1] = 'b'",
        "adacc.rectifier.max_intervall = 8",
    ]


@pytest.mark.parametrize(
    ("section", "shown"), [(None, "null"), (True, "true"), (3, "3"), ("auto", "'auto'"), ([], "[]")]
)
def test_the_section_is_an_object(section, shown):
    assert errors(section) == [f'adacc = {shown}: must be an object, such as {{"memory_budget": 0.4}}']


@pytest.mark.parametrize("key", ["adac", "Adacc", "ADACC", "adaac", "addacc", "acdacc", "ds_adacc", "adacc_"])
def test_misspelt_sections_are_caught(key):
    with pytest.raises(ConfigError, match=f"^{key}: unknown section; did you mean 'adacc'\\?$"):
        load({key: {}})


def test_a_section_within_another_one_is_out_of_place():
    with pytest.raises(ConfigError) as error:
        load({"zero_optimization": {"stage": 2, "adacc": {"memory_budget": 0.4}}})
    assert str(error.value) == (
        "zero_optimization.adacc: the section belongs beside 'zero_optimization', at the top level of ds_config"
    )


def test_no_key_of_deepspeeds_is_taken_for_the_section():
    theirs = {v for k, v in vars(constants).items() if k.isupper() and isinstance(v, str) and v.isidentifier()}
    assert {"train_batch_size", "fp16"} <= theirs
    theirs |= {"activation_checkpointing", "zero_optimization", "autotuning", "aio", "adam", "acc", "data_efficiency"}
    assert load(dict.fromkeys(theirs)) is None


def test_a_file_may_have_comments_as_deepspeeds_may(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{\n  # tuned by hand\n  "train_batch_size": 8,\n  "adacc": {"group_size": 64}\n}\n')
    assert load(path).group_size == load(str(path)).group_size == 64
    assert read(path)["train_batch_size"] == 8


def test_base64_as_deepspeeds_launcher_passes_it():
    document = {"train_batch_size": 8, "adacc": {"group_size": 64}}
    encoded = base64.urlsafe_b64encode(json.dumps(document).encode()).decode()
    assert load(encoded).group_size == 64
    assert read(encoded) == document


def test_read_of_nothing_and_of_a_mapping():
    document = {"adacc": {}}
    assert read(None) == {}
    assert read(document) is document


@pytest.mark.parametrize("name", ["ds_confg.json", "naïve.json", "missing", "configs/deep speed.json", "abcd"])
def test_a_missing_file_is_named_with_the_folder_where_it_is_missing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load(name)
    assert str(error.value) == f"ds_config {name!r}: no such file in {tmp_path}, and not base64-encoded JSON either"
    with pytest.raises(ConfigError, match=r"\.json': no such file, and not base64"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"adacc": ', "Expecting value"),
        ('{"adacc": {}, "adacc": {}}', "key 'adacc' appears twice"),
        ("[1, 2]", "must hold a JSON object, not list"),
        ("\xff", "can't decode"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        load(path)
    assert str(error.value).startswith(f"ds_config {str(path)!r}: ")
    assert message in str(error.value)


def test_a_directory_is_named(tmp_path):
    with pytest.raises(ConfigError, match="directory"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"codecs": {"linear": ["bits"]}}, "valid for role 'dropout_mask' only"),
        ({"codecs": {"linear": ["group", "group"]}}, "names a codec twice"),
        ({"group_size": 65538}, "at most 65536"),
    ],
)
def test_what_can_never_apply_is_refused(section, message):
    (line,) = errors(section)
    assert message in line
