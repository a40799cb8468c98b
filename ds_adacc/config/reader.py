"""Read ds_config as DeepSpeed reads it, and check its "adacc" section."""

import base64
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import hjson
from pydantic import BaseModel, ValidationError

from ds_adacc.config.problems import ConfigError, Location, nearest
from ds_adacc.config.section import SECTION, AdaccConfig

ENVIRONMENT = "ADACC_CONFIG"  # an environment variable

_ABSENT = object()  # no value of a key is equal to it
_NUMBER_OR_BOOLEAN = re.compile(r"true|false|\d+(\.\d+)?(e-?\d+)?")
_EXAMPLES = {  # of nested sections
    "rectifier": '{"enabled": false}',
    "solver": '{"max_seconds": 10}',
    "compact": '{"rank": 0.25}',
}
_UNMISTAKABLE = ("memory_budget", "codecs", "max_gradient_error", "zscore_threshold", "rectifier")  # only ours
_TYPES = {  # by pydantic's name of the error
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "float_type": "must be a number",
    "int_type": "must be an integer",
}


def load(ds_config: str | os.PathLike[str] | Mapping[str, Any] | None) -> AdaccConfig | None:
    """Return the "adacc" section of `ds_config`, or None if it is absent or `"enabled": false`.

    `ds_config` is as for `read`. Raises what `read` and `section_of` raise.
    """
    return section_of(read(ds_config))


def section_of(document: Mapping[str, Any]) -> AdaccConfig | None:
    """Return the "adacc" section of a ds_config that was read, or None if it is absent or `"enabled": false`.

    A disabled section is checked as well. Raises ConfigError, with one line for each thing that is wrong.
    """
    problems = [f"{key}: unknown section; did you mean {SECTION!r}?" for key in document if _resembles_section(key)]
    problems += [
        f"{key}.{SECTION}: the section belongs beside {key!r}, at the top level of ds_config"
        for key, value in document.items()
        if key != SECTION and isinstance(value, Mapping) and SECTION in value
    ]
    if SECTION in document:
        problems += [f"{key}: the key belongs within {SECTION!r}" for key in misplaced(document)]
    section = document.get(SECTION, {})
    config = None
    if not isinstance(section, Mapping):
        problems.append(f'{SECTION} = {_shown(section)}: must be an object, such as {{"memory_budget": 0.4}}')
    else:
        try:
            config = AdaccConfig.model_validate(dict(section))
        except ValidationError as error:
            problems += [line for detail in error.errors(include_url=False) for line in _lines(detail)]
    if problems:
        raise ConfigError("\n".join(problems))
    return config if SECTION in document and config is not None and config.enabled else None


def misplaced(document: Mapping[str, Any]) -> list[str]:
    """The keys at the top level of a ds_config that only the section has."""
    return [key for key in _UNMISTAKABLE if key in document]


def read(ds_config: str | os.PathLike[str] | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the whole of ds_config, read as DeepSpeed reads it: {} for None.

    `ds_config` is a mapping, the path of a JSON file (in which Hjson's comments are allowed), or JSON encoded as
    URL-safe base64. If the environment variable ADACC_CONFIG is set, it gives the "adacc" section. Raises ConfigError
    if `ds_config` is none of these, or the variable cannot be used.
    """
    return _with_environment(_read(ds_config))


def origin(ds_config: str = "ds_config") -> str:
    """Where the section comes from, in words: the environment variable if it is set, or `ds_config`."""
    return f"from {ENVIRONMENT}" if _given() else f"of {ds_config}"


def _given() -> str:
    return os.environ.get(ENVIRONMENT, "").strip()


def _read(ds_config: str | os.PathLike[str] | Mapping[str, Any] | None) -> Mapping[str, Any]:
    if ds_config is None or isinstance(ds_config, Mapping):
        return ds_config or {}
    if not isinstance(ds_config, str | os.PathLike):
        raise ConfigError(f"ds_config = {ds_config!r}: must be a mapping, a path, or JSON encoded as URL-safe base64")
    name = os.fspath(ds_config)
    shown = f"ds_config {name[:200]!r}"
    try:
        document = hjson.loads(_text(name), object_pairs_hook=_without_duplicates)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown}: {error}{_as_json(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{shown}: its brackets are nested too deeply") from error
    if not isinstance(document, Mapping):
        raise ConfigError(f"{shown}: must hold a JSON object, not {type(document).__name__}")
    return document


def _with_environment(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ds_config, with the section that the environment variable ADACC_CONFIG gives, if it is set.

    For scripts whose ds_config is written in code. The variable holds the section as JSON, or the path of a JSON file
    with the section, or with a ds_config that has it. Raises ConfigError if it is neither, and if ds_config has another
    section too.
    """
    given = _given()
    if not given:
        return document
    try:
        found = _read(hjson.loads(given, object_pairs_hook=_without_duplicates) if given.startswith("{") else given)
    except ValueError as error:  # ConfigError too
        why: object = error
        if _is_json(given):
            why = f"{given} is JSON, but no object"
        elif not given.startswith("{") and not os.path.exists(given):
            why = f"there is no file {given[:200]!r}"
        raise ConfigError(f"{ENVIRONMENT}: must be a JSON object, or the path of a JSON file: {why}") from error
    section = found.get(SECTION, found)
    if found and not given.startswith("{") and not found.keys() & {SECTION, *AdaccConfig.model_fields}:
        valid = ", ".join(map(repr, AdaccConfig.model_fields))
        raise ConfigError(f"{ENVIRONMENT}: {given!r} has no {SECTION!r} section, and none of its keys ({valid}) either")
    if (other := document.get(SECTION, section)) != section:
        raise ConfigError(
            f"{ENVIRONMENT} is set, and ds_config has another {SECTION!r} section ({_difference(section, other)}): "
            "remove one of the two"
        )
    return {**document, SECTION: section}


def _difference(section: Any, other: Any) -> str:
    """How the section that the environment variable gives differs from that of ds_config, in words."""
    if not isinstance(section, Mapping) or not isinstance(other, Mapping):
        return f"{_shown(section)} and {_shown(other)}"
    keys = [key for key in {**section, **other} if section.get(key, _ABSENT) != other.get(key, _ABSENT)]
    return "; ".join(f"{key} is {_at(section, key)} in {ENVIRONMENT}, {_at(other, key)} in ds_config" for key in keys)


def _at(section: Mapping[str, Any], key: str) -> str:
    return _shown(section[key]) if key in section else "absent"


def _as_json(error: Exception) -> str:
    """What JSON's reader says of a text that Hjson's cannot read, as it finds the place of `True`; else ""."""
    if isinstance(error, hjson.HjsonDecodeError):
        try:
            json.loads(error.doc)
        except ValueError as plain:
            return f"; as JSON: {plain}"
    return ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _text(name: str) -> str:
    if os.path.exists(name):
        with open(name, encoding="utf-8") as file:
            return file.read()
    try:
        decoded = base64.urlsafe_b64decode(name).decode("utf-8")
    except ValueError:  # not base64, not ASCII, or not UTF-8
        decoded = ""
    if not decoded.lstrip().startswith("{"):
        folder = "" if os.path.isabs(name) else f" in {os.getcwd()}"
        raise ValueError(f"no such file{folder}, and not base64-encoded JSON either")
    return decoded


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return unique


def _resembles_section(key: Any) -> bool:
    """Whether a top-level key looks like a misspelt "adacc". No key of DeepSpeed's is as similar."""
    return key != SECTION and difflib.SequenceMatcher(None, str(key).lower(), SECTION).ratio() > 0.76


def _lines(detail: Mapping[str, Any]) -> list[str]:
    """The lines of the message for one error of pydantic."""
    location, value = detail["loc"], detail["input"]
    if detail["type"] == "problems":
        problems = detail["ctx"]["problems"]
    elif location == (SECTION,):
        problems = [((), value, f"the section lies within itself; remove one of the two {SECTION!r}")]
    elif detail["type"] in ("extra_forbidden", "invalid_key"):
        keys = _keys(location[:-1])
        problems = [((), value, f"unknown key{_nested(location[-1], value, keys) or nearest(location[-1], keys)}")]
    else:
        null = type(None) in _types(location)
        message = _TYPES.get(detail["type"]) or detail["msg"].replace("Input should be", "must be")
        if detail["type"] == "model_type":
            is_switch = isinstance(value, bool) and "enabled" in _keys(location)
            example = f'{{"enabled": {_shown(value)}}}' if is_switch else _EXAMPLES[location[-1]]
            message = f"must be an object, such as {example}"
        problems = [((), value, f"{message}{', or null' if null else ''}{_unquoted(value, null)}")]
    where = f" ({origin()})" if _given() else ""
    return [f"{_path((*location, *below))} = {_shown(what)}{where}: {message}" for below, what, message in problems]


def _shown(value: Any) -> str:
    """The value as the user wrote it: three of JSON's words are others in Python."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _unquoted(value: Any, null: bool) -> str:
    """The end of a message, if a number, true, false or, where that is valid, null is given in quotes."""
    is_quoted = isinstance(value, str) and (_NUMBER_OR_BOOLEAN.fullmatch(value) or (null and value == "null"))
    return f"; did you mean {value}, without quotes?" if is_quoted else ""


def _nested(key: str | int, value: Any, keys: Iterable[str]) -> str:
    """How to write a key that was given with a dot, as the documentation names it; "" for any other key."""
    outer, dot, inner = str(key).partition(".")
    if not dot or outer not in keys:
        return ""
    return f'; write it as "{outer}": {{"{inner}": {json.dumps(value, default=repr)}}}'


def _types(location: Location) -> tuple[Any, ...]:
    """The types of the key at `location`."""
    types: tuple[Any, ...] = (AdaccConfig,)
    for key in location:
        annotation = _part(types).model_fields[str(key)].annotation
        types = (annotation, *get_args(annotation))
    return types


def _part(types: tuple[Any, ...]) -> type[BaseModel]:
    return next(each for each in types if hasattr(each, "model_fields"))


def _keys(location: Location) -> Iterable[str]:
    """The valid keys of the section, or of its part at `location`."""
    return _part(_types(location)).model_fields


def _path(location: Location) -> str:
    return SECTION + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in location)
