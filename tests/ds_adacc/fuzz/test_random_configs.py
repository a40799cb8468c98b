"""Random sections and ds_configs: valid and usable, or an error naming the key, the value and what would be valid."""

import base64
import random
import re

import pytest
import torch
import zoo
from fuzz.sections import WEIRD, section, text

from ds_adacc import planner
from ds_adacc.config import AdaccConfig, ConfigError, load
from ds_adacc.engine.api import _zero_stage
from ds_adacc.runtime.runtime import Runtime

SECTIONS, TEXTS, USED = 2000, 150, 12
LINE = re.compile(r"(adacc(\.|\[| = )|.{1,3000}: unknown section; did you mean 'adacc'\?)", re.DOTALL)
HINT = re.compile("must|valid: |did you mean|appears twice|names a codec twice|which is not set|is valid for")


def loaded(source):
    """The config, None, or the ConfigError; whatever else is raised passes through."""
    try:
        return load(source)
    except ConfigError as error:
        return error


def test_sections_are_valid_or_told_apart_line_by_line():
    valid = wrong = 0
    for seed in range(SECTIONS):
        found = loaded({"adacc": (made := section(random.Random(seed)))})
        if isinstance(found, ConfigError):
            wrong += 1
            problems = re.split(r"\n(?=adacc)", str(found))
            bad = [line for line in problems if not LINE.match(line) or not HINT.search(line)]
            assert not bad, (seed, made, bad)
        else:
            valid += isinstance(found, AdaccConfig)
    assert valid > SECTIONS / 4 < wrong


def test_texts_are_read_or_refused(tmp_path):
    path, outcomes = tmp_path / "ds_config.json", set()
    for seed in range(TEXTS):
        content = text(random.Random(seed))
        path.write_text(content, encoding="utf-8")
        encoded = base64.urlsafe_b64encode(content.encode()).decode()
        outcomes |= {type(loaded(source)) for source in (path, str(path), encoded, content[:200])}
    assert outcomes == {AdaccConfig, ConfigError, type(None)}


@pytest.mark.parametrize("source", [5, 0.5, True, b"{}", [1], {"adacc"}, object(), [["adacc", {}]]])
def test_what_is_no_config_at_all(source):
    with pytest.raises(ConfigError, match=r"ds_config = .*: must be a mapping, a path, or JSON encoded"):
        load(source)


def test_files_that_cannot_be_read(tmp_path):
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe{}")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    expected = {tmp_path / "none.json": "no such file", tmp_path: "directory", binary: "decode", deep: "too deeply"}
    for path, words in expected.items():
        with pytest.raises(ConfigError, match=words):
            load(path)


def test_other_sections_of_any_value():
    for value in WEIRD:
        try:
            stage = _zero_stage({"zero_optimization": value})
        except ConfigError as error:
            assert "zero_optimization" in str(error) and "stage is 0, 1, 2 or 3" in str(error)
        else:
            assert stage == 0
        assert isinstance(load({"adacc": {}, "optimizer": value}), AdaccConfig)


@pytest.mark.filterwarnings("ignore")
def test_what_is_valid_can_be_used():
    block, args, kwargs = zoo.example("gpt", batch=1, time=5)
    used = fits = 0
    for seed in range(SECTIONS):
        config = loaded({"adacc": section(random.Random(seed))})
        if isinstance(config, AdaccConfig) and used < USED:
            used += 1
            fits += runs(Runtime(config), block, args, kwargs)
    assert used == USED and fits > USED / 4


def runs(runtime, block, args, kwargs):
    """Whether the block can be run in this way: finite gradients, or an error that says how much it would take."""
    for _ in range(3):
        try:
            loss, gradients = zoo.gradients(block, args, kwargs, lambda *a, **k: runtime.checkpoint(block, *a, **k))
        except planner.InfeasibleBudget as error:
            assert re.search(r"budget.*smallest|smallest.*budget|max_gradient_error", str(error), re.DOTALL), error
            return False
        assert torch.isfinite(loss) and all(torch.isfinite(g).all() for g in gradients.values())
    return True
