"""The keys, types, defaults and checks of the "adacc" section of ds_config."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator

from ds_adacc.config.memory_budget import MemoryBudget, to_memory_budget
from ds_adacc.config.presets import PRESETS, ROLES, UNBOUNDED
from ds_adacc.config.problems import Problem, invalid, nearest
from ds_adacc.kernels import BACKENDS, CODECS, ROUNDINGS, SCALES

SECTION = "adacc"

LARGEST_BOUND = 1e9  # on the gradient error
COMPACT_SCALE = 0.25  # of a layer's updates, where the section does not say otherwise

_BY_ROLE = ', or an object of roles and their codecs, such as {"linear": ["outlier", "group"], "key": "channel"}'


def _group_size(value: int) -> int:
    if not 2 <= value <= 65536 or value % 2:
        raise invalid(((), value, "must be even and at least 2, as two 4-bit codes share a byte; at most 65536"))
    return value


def _bound(value: float) -> float:
    if not 1e-9 <= value <= LARGEST_BOUND:
        raise invalid(((), value, "must be from 1e-9 to 1e9, or null; to allow no error, set 'codecs' to 'none'"))
    return value


def _listed(value: Any, what: str, example: str, meant: list[str]) -> tuple[Any, ...]:
    """The entries of a list that is valid beside "auto", and has at least one. `what`: an entry, in the singular.

    `meant`: the entries that a value which is no list is likely to mean; [] if that is not known.
    """
    if isinstance(value, str | type):
        is_auto = isinstance(value, str) and value.lower() in ("auto", "all")
        hint = f"; did you mean {'auto' if is_auto else meant!r}?" if is_auto or meant else example
        raise invalid(((), value, f"must be 'auto' or a list of {what}s{hint}"))
    if not isinstance(value, list | tuple) or not value:
        raise invalid(((), value, f"must be 'auto' or a list of at least one {what}{example}"))
    return tuple(value)


def _block_classes(value: Any) -> str | tuple[str, ...]:
    if value == "auto":
        return value
    example = ", such as 'LlamaDecoderLayer'"
    names = _listed(value, "module class name", example, _class_names(value))
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name.isidentifier():
            meant = _class_names(name)
            hint = f"; did you mean {', '.join(map(repr, meant))}?" if meant else example
            raise invalid(((index,), name, f"must be the name of a class{hint}"))
    return names


def _class_names(value: Any) -> list[str]:
    """The names of classes that this value is likely to mean: a class, a path, or several; [] if that is not known."""
    if isinstance(value, type):
        return [value.__name__]
    names = re.split(r"[,\s]+", value.strip()) if isinstance(value, str) else []
    paths = [name.rpartition(".") for name in names]
    if any(outer and not last[:1].isupper() for outer, _, last in paths):  # "model.layers": of a module, not a class
        return []
    names = [last for _, _, last in paths]
    return names if all(map(str.isidentifier, names)) else []


def _codecs(value: Any) -> str | dict[str, tuple[str, ...]]:
    if isinstance(value, str):
        if value not in PRESETS:
            role = "dropout_mask" if value == "bits" else "linear"
            meant = nearest(value, PRESETS, {"lossless": "none"})
            hint = "" if "did you mean" in meant else _BY_ROLE
            if value in CODECS:
                hint = f"; a codec is given by role, as in {{{role!r}: {value!r}}}"
            raise invalid(((), value, f"unknown preset{meant}{hint}"))
        return value
    if not isinstance(value, Mapping):
        presets = ", ".join(map(repr, PRESETS))
        hint = "; did you mean 'none'?" if value is None or value is False else ""
        message = f"must be one of {presets}{_BY_ROLE}{hint}"
        raise invalid(((), value, message))
    problems = [problem for role, names in value.items() for problem in _codec_problems(role, names)]
    if problems:
        raise invalid(*problems)
    return {role: (names,) if isinstance(names, str) else tuple(names) for role, names in value.items()}


def _codec_problems(role: str, names: Any) -> Iterable[Problem]:
    if role not in ROLES:
        yield (role,), names, f"unknown role{nearest(role, ROLES)}"
        return
    if isinstance(names, str):
        named = {(role,): names}
    elif isinstance(names, list | tuple):
        named = {(role, index): name for index, name in enumerate(names)}
    else:
        yield (role,), names, f"must be the name of a codec, or a list of names{_no_codec(names)}"
        return
    for where, name in named.items():
        if name not in CODECS:
            of_role = CODECS if role == "dropout_mask" else [codec for codec in CODECS if codec != "bits"]
            yield where, name, f"unknown codec{nearest(name, of_role)}{_no_codec(name)}"
        elif name == "bits" and role != "dropout_mask":
            yield where, name, "codec 'bits' is valid for role 'dropout_mask' only"
    if len(set(map(str, named.values()))) < len(named):
        yield (role,), names, "names a codec twice"


def _no_codec(name: Any) -> str:
    """The end of a message, if the value in place of a codec seems to say that there is to be none."""
    return "; a role that is left out is never compressed" if name in (None, False, "none", "off", "null") else ""


def _roles(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise invalid(((), value, "must be a list of roles"))
    problems = [((i,), r, f"unknown role{nearest(r, ROLES)}") for i, r in enumerate(value) if r not in ROLES]
    if problems:
        raise invalid(*problems)
    return tuple(value)


def _rank(value: Any) -> int | float:
    if type(value) is int and value > 1:  # a file's 1.0 is read as 1, which would be a rank of one feature
        return value
    if type(value) is float and 0 < value < 1:
        return value
    hint = "must be a fraction of the layer's input features (0 < decimal number < 1), or a whole number from 2"
    raise invalid(((), value, hint))


def _compact_scale(value: Any) -> float | dict[str, float]:
    """A number for all layers, or numbers by name pattern."""
    if isinstance(value, Mapping):
        problems = [((key,), given, "must be a number above 0") for key, given in value.items() if not _is_scale(given)]
        if problems or not value:
            raise invalid(*problems or [((), value, "must name at least one pattern")])
        return {str(key): float(given) for key, given in value.items()}
    if not _is_scale(value):
        raise invalid(((), value, "must be a number above 0, or an object of name patterns and their numbers"))
    return float(value)


def _is_scale(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _layers(value: Any) -> str | tuple[str, ...]:
    if value == "auto":
        return value
    patterns = _listed(value, "name pattern", ", such as '*.mlp.*'", [value] if isinstance(value, str) else [])
    problems = [((i,), each, "must be a name pattern") for i, each in enumerate(patterns) if not isinstance(each, str)]
    if problems:
        raise invalid(*problems)
    return patterns


def _choice_of(kind: str, choices: Iterable[str], synonyms: Mapping[str, str] | None = None) -> PlainValidator:
    """A check that the value is one of `choices`. `synonyms`: names that mean one of them, for the message."""

    def check(value: Any) -> str:
        if value not in choices:
            raise invalid(((), value, f"unknown {kind}{nearest(value, choices, synonyms)}"))
        return value

    return PlainValidator(check)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RectifierConfig(_Part):
    """When outliers are measured again (section 3.4 of the Adacc paper).

    `max_interval`: the most steps between two tracking steps. `drift`: the relative rise of a compression rate from
    which on a new plan is made; so is a fall by twice as much. `roles`: those of the values that are measured.
    """

    enabled: bool = True
    max_interval: Annotated[int, Field(ge=1)] = 1024
    drift: Annotated[float, Field(gt=0, le=10)] = 0.10
    roles: Annotated[tuple[str, ...], PlainValidator(_roles)] = ("linear", "layernorm", "gelu", "query", "key", "value")

    @model_validator(mode="after")
    def _has_something_to_look_at(self) -> "RectifierConfig":
        if self.enabled and not self.roles:
            raise invalid((("roles",), [], "must name at least one role; to track none, set 'enabled' to false"))
        return self


class SolverConfig(_Part):
    """`max_seconds`: how long the solver may search for one plan."""

    max_seconds: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 5.0


class CompactConfig(_Part):
    """Linear layers that save a random projection of their input (Shamshoum et al., CompAct, NAACL 2025).

    `rank`: features of the projection: a fraction of the layer's input features n, or a number of at most n.
    `update_interval`: optimizer steps after which each layer draws another projection; null: never.
    `scale`: the factor of each update of the weights; a number, or by pattern of the layer's name, the first that fits.
    `layers`: "auto", or patterns (as of `fnmatch`) of the dotted names of Linear layers within the blocks.
    """

    rank: Annotated[int | float, PlainValidator(_rank)] = 0.25
    update_interval: Annotated[int, Field(ge=1)] | None = 200
    scale: Annotated[float | dict[str, float], PlainValidator(_compact_scale)] = COMPACT_SCALE
    layers: Annotated[Literal["auto"] | tuple[str, ...], PlainValidator(_layers)] = "auto"


class AdaccConfig(_Part):
    """The "adacc" section.

    `blocks`: "auto", or the class names of the modules to wrap.
    `memory_budget`: see `MemoryBudget`.
    `codecs`: a name in PRESETS, or a mapping of roles to codecs.
    `max_gradient_error`: a bound on the measured relative error of each block's gradient; null: no bound. Presets in
    UNBOUNDED have none unless the section sets one.
    `offload`: whether values on a CUDA device, or the payloads of their codecs, may wait in host memory.
    `group_size`: elements that share a scale; even, as two codes share a byte.
    `scale`: "extreme" anchors it at the signed extreme of its group; "paper" is max|x| / 8 (equation 2), which clips
    it.
    `rounding`: to the "nearest" code, or "stochastic".
    `zscore_threshold`: a channel with a higher score is an outlier (equation 1).
    `rectifier`, `solver`, `compact`: see their classes. Without `compact`, all Linear layers stay as they are.
    `backend`: the codecs' implementation; "auto": the fastest that the device has.
    """

    enabled: bool = True
    blocks: Annotated[Literal["auto"] | tuple[str, ...], PlainValidator(_block_classes)] = "auto"
    memory_budget: Annotated[MemoryBudget, PlainValidator(to_memory_budget)] = MemoryBudget("auto")
    codecs: Annotated[str | dict[str, tuple[str, ...]], PlainValidator(_codecs)] = "auto"
    max_gradient_error: Annotated[float, AfterValidator(_bound)] | None = 0.1
    offload: bool = True
    group_size: Annotated[int, AfterValidator(_group_size)] = 128
    scale: Annotated[str, _choice_of("scale", SCALES)] = "extreme"
    rounding: Annotated[str, _choice_of("rounding", ROUNDINGS)] = "nearest"
    zscore_threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3.0
    rectifier: Annotated[RectifierConfig, Field(strict=False)] = RectifierConfig()
    solver: Annotated[SolverConfig, Field(strict=False)] = SolverConfig()
    compact: Annotated[CompactConfig | None, Field(strict=False)] = None
    backend: Annotated[str, _choice_of("backend", ("auto", *BACKENDS), {"gpu": "cuda"})] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _without_a_bound(cls, section: Any) -> Any:
        if isinstance(section, Mapping) and section.get("codecs") in UNBOUNDED:
            return {"max_gradient_error": None, **section}
        return section

    @model_validator(mode="after")
    def _can_keep_its_bound(self) -> "AdaccConfig":
        if self.forces_compression and self.max_gradient_error is not None:
            hint = (
                f"must be null with codecs {self.codecs!r}, which compresses everything whatever its error; for a "
                "bound, set 'codecs' to 'auto' or 'paper'"
            )
            raise invalid((("max_gradient_error",), self.max_gradient_error, hint))
        return self

    def differences(self, other: "AdaccConfig") -> list[tuple[str, Any, Any]]:
        """The keys that have another value in the other section, each with the value here and the one there."""
        both = ((key, getattr(self, key), getattr(other, key)) for key in type(self).model_fields)
        return [(key, own, its) for key, own, its in both if own != its]

    @property
    def forces_compression(self) -> bool:
        """Whether everything that can be compressed must be, whatever it costs: the paper's baseline "Quantization"."""
        return self.codecs == "quantization"


def codecs_for(config: AdaccConfig) -> dict[str, tuple[str, ...]]:
    """Return the names of the codecs on offer for each role; an empty tuple for a role that is never compressed."""
    chosen = PRESETS[config.codecs] if isinstance(config.codecs, str) else config.codecs
    return {role: chosen.get(role, ()) for role in ROLES}
