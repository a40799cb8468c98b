"""ADACC_CONFIG gives the section to scripts whose ds_config is written in code."""

import json

import pytest

from ds_adacc.config import ConfigError, load

SECTION = {"memory_budget": 0.5, "codecs": "none"}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("in_file", [False, True])
def test_the_section_as_json_or_in_a_file(tmp_path, monkeypatch, named, in_file):
    text = json.dumps({"adacc": SECTION} if named else SECTION)
    (tmp_path / "section.json").write_text(text)
    monkeypatch.setenv("ADACC_CONFIG", str(tmp_path / "section.json") if in_file else text)
    assert load({"fp16": {"enabled": True}}) == load(None) == load({"adacc": SECTION})


def test_an_empty_variable_says_nothing(monkeypatch):
    monkeypatch.setenv("ADACC_CONFIG", " ")
    assert load({}) is None
    assert load({"adacc": SECTION}) is not None


def test_a_second_section_is_refused(monkeypatch):
    monkeypatch.setenv("ADACC_CONFIG", json.dumps(SECTION))
    assert load({"adacc": SECTION}) is not None
    with pytest.raises(ConfigError, match="ADACC_CONFIG is set, and ds_config has another 'adacc' section") as raised:
        load({"adacc": {"memory_budget": 0.4, "offload": False}})
    assert str(raised.value).endswith(
        "(memory_budget is 0.5 in ADACC_CONFIG, 0.4 in ds_config; codecs is 'none' in ADACC_CONFIG, absent in "
        "ds_config; offload is absent in ADACC_CONFIG, false in ds_config): remove one of the two"
    )
    with pytest.raises(ConfigError, match=r"another 'adacc' section \({'memory_budget': 0.5, .+} and null\): remove"):
        load({"adacc": None})


@pytest.mark.parametrize("text", ["{", "no-such-file.json", "{'a': 1", '{"memory_budget": 0.5, "memory_budget": 0.4}'])
def test_what_is_neither_is_refused(monkeypatch, text):
    monkeypatch.setenv("ADACC_CONFIG", text)
    with pytest.raises(ConfigError, match="ADACC_CONFIG: must be a JSON object, or the path of a JSON file"):
        load({})


def test_a_file_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("ADACC_CONFIG", "no-such-file.json")
    with pytest.raises(ConfigError, match=r"or the path of a JSON file: there is no file 'no-such-file\.json'$"):
        load({})


def test_a_ds_config_without_the_section_is_called_so(tmp_path, monkeypatch):
    path = tmp_path / "ds_config.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    monkeypatch.setenv("ADACC_CONFIG", str(path))
    with pytest.raises(ConfigError) as error:
        load({})
    told = f"ADACC_CONFIG: {str(path)!r} has no 'adacc' section, and none of its keys ('enabled', 'blocks', "
    assert str(error.value).startswith(told)


@pytest.mark.parametrize("text", ["0.4", "null", '""', "[]", "true"])
def test_json_that_is_no_object_is_called_so(monkeypatch, text):
    monkeypatch.setenv("ADACC_CONFIG", text)
    with pytest.raises(ConfigError) as error:
        load({})
    assert str(error.value).endswith(
        f"must be a JSON object, or the path of a JSON file: {text} is JSON, but no object"
    )


def test_its_mistakes_are_named(monkeypatch):
    monkeypatch.setenv("ADACC_CONFIG", '{"memory_budgett": 0.5}')
    with pytest.raises(ConfigError, match=r"^adacc\.memory_budgett = 0\.5 \(from ADACC_CONFIG\): unknown key"):
        load({})
