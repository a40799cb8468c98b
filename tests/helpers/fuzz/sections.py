"""Random "adacc" sections and ds_configs, of values that fit and of values that nobody would write on purpose."""

from __future__ import annotations

import json
import random

from ds_adacc.config.presets import PRESETS, ROLES
from ds_adacc.kernels import BACKENDS, CODECS, ROUNDINGS, SCALES

NAN, INFINITY = float("nan"), float("inf")
WEIRD = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 10**30, -(10**30), 1 << 64, 0.0, -0.0, 0.5, 1.0, 1.5, 1e-320, 1e308, -2.5),
    *(NAN, INFINITY, -INFINITY, "", " ", "auto", "AUTO", "none", "0.5", "12GiB", "0 GB", "-1GB", "9" * 400 + "GB"),
    *("1e3GB", "é", "日本", "\x00", "a" * 5000, "true", [], [[]], [None], ["auto"], ["é"], [1, "a"], [[["x"]]], {}),
    *(
        {"a": 1},
        {"": None},
        {"enabled": True},
        ["linear", "linear"],
        ["Block", "Block"],
        {"linear": ["group", "group"]},
    ),
    *({"linear": {"group": 1}}, {"linear": None}, {"linear": [[]]}, {"lnear": "group"}, {1: 2}, {None: "group"}),
    *(b"bytes", (1, 2), {"roles"}, 1j, object, "\u0661\u0662GiB", "1_000KB", "\u0663", "NaN", "inf GB"),
)
VALID = {
    "enabled": (True, True, False),
    "blocks": ("auto", ["Block"], ("A", "B")),
    "memory_budget": ("auto", "12GiB", "1.5 GB", 1 << 20, 1 << 40, 0.4, 1.0, 1e-9, "1B"),
    "codecs": (*PRESETS, {}, {"linear": "group"}, {"dropout_mask": ["bits"], "key": ["channel", "token8"]}),
    "max_gradient_error": (None, 0.05, 1, 1e-9, 1e9),
    "offload": (True, False),
    "group_size": (2, 64, 128, 65536),
    "scale": SCALES,
    "rounding": ROUNDINGS,
    "zscore_threshold": (3, 3.0, 1e-9, 1e300),
    "rectifier": ({}, {"enabled": False, "roles": []}, {"max_interval": 1, "drift": 10}, {"roles": ["key"]}),
    "solver": ({}, {"max_seconds": 2}, {"max_seconds": 1e6}, {"max_seconds": 1e-300}),
    "compact": (None, {}, {"rank": 8, "layers": ["*.fc1"]}, {"scale": {"*": 1, "b": 0.5}, "update_interval": None}),
    "backend": ("auto", "reference", "cpu"),
}
NESTED = {
    "rectifier": ("enabled", "max_interval", "drift", "roles"),
    "solver": ("max_seconds",),
    "compact": ("rank", "update_interval", "scale", "layers"),
    "codecs": ROLES,
}
NAMES = (*CODECS, *ROLES, *BACKENDS)


def section(lot):
    """A section; about half of them are valid."""
    if lot.random() < 0.04:
        return lot.choice(WEIRD)
    keys = lot.sample(list(VALID), lot.randint(0, 5))
    made = {key: lot.choice(VALID[key]) for key in keys}
    for _ in range(lot.choice([0, 0, 0, 1, 2, 3])):
        _spoil(made, lot)
    return made


def _spoil(made, lot):
    way = lot.choice(["value", "value", "nested", "key", "case"])
    key = lot.choice(list(VALID))
    if way == "value":
        made[key] = lot.choice(WEIRD)
    elif way == "nested":
        outer = lot.choice(list(NESTED))
        inner = lot.choice([*NESTED[outer], "nonsense", "", 3])
        made[outer] = {inner: lot.choice([*WEIRD, lot.choice(NAMES), lot.sample(NAMES, 2)])}
    elif way == "key":
        made[lot.choice(["", "memory_bugdet", "é", 5, None, "x" * 3000, key[:-1], f"{key} "])] = lot.choice(WEIRD)
    else:
        made[key.upper()] = lot.choice(VALID[key])


def text(lot):
    """The text of a ds_config file: JSON, Hjson, or neither."""
    document = {"adacc": section(lot), "train_batch_size": 8, lot.choice(["a", "Adacc", "adaac", "zero"]): 1}
    good = json.dumps(document, default=str, skipkeys=True)
    place = lot.randrange(len(good))
    return lot.choice(
        [
            good,
            good,
            "# a comment\n" + good,
            good[:place],
            good[:place] + lot.choice('{}[]",:\\\x00é') + good[place:],
            good.replace("{", '{"adacc": {}, ', 1),
            json.dumps([document], default=str, skipkeys=True),
            json.dumps(section(lot), default=str, skipkeys=True),
            "",
            "[" * 3000,
            '{"adacc": ' * 3000,
            "adacc: {memory_budget: 0.5}",
            "{adacc: {memory_budget: 0.5}}",
            random.Random(lot.random()).randbytes(40).decode("latin-1"),
        ]
    )
