"""Which Linear layers CompAct serves, with which rank and scale; and why it leaves the others alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ds_adacc.config import COMPACT_SCALE, CompactConfig, ConfigError
from ds_adacc.program.parameters import whole_shape

# Names of attention's output projection. Some are used in MLPs too: those count within an attention module only.
_OUTPUT_ANYWHERE = frozenset({"o", "o_proj", "out_proj", "to_out", "proj", "projection"})
_OUTPUT_IN_ATTENTION = _OUTPUT_ANYWHERE | {"c_proj", "dense", "out", "out_lin", "proj_out", "wo"}
_ATTENTION = ("attention", "attn")
_MLP = ("mlp", "ffn", "feed_forward", "feedforward")


@dataclass(frozen=True)
class Chosen:
    """A layer to serve. `name` is its dotted name in the model, `rank` is r, `scale` the factor of its updates."""

    name: str
    layer: nn.Linear
    rank: int
    scale: float


def choose(
    model: nn.Module, blocks: Mapping[str, nn.Module], config: CompactConfig, trained: Collection[int]
) -> tuple[list[Chosen], dict[str, str]]:
    """The layers to serve, and by name the reason for each layer with a weight matrix that is left alone.

    `blocks` are modules of the model by name. `trained`: the `id` of every parameter that the optimizer is given.
    Raises ConfigError if a pattern fits no Linear layer of the blocks, if a rank is larger than a layer's input, and if
    there is nothing to serve.
    """
    uses = _uses(model)
    linear = [name for name, module in _matrices(blocks) if isinstance(module, nn.Linear)]
    for pattern in () if config.layers == "auto" else config.layers:
        if not any(fnmatchcase(name, pattern) for name in linear):
            raise ConfigError(f"adacc.compact.layers: {pattern!r} fits no Linear layer of the blocks{_listed(linear)}")
    chosen: list[Chosen] = []
    left: dict[str, str] = {}
    for name, module in _matrices(blocks):
        if config.layers != "auto" and not any(fnmatchcase(name, pattern) for pattern in config.layers):
            continue
        reason = _why_not(name, module, uses, trained)
        if reason is None and config.layers == "auto" and _is_attention_output(name):
            reason = "attention's output projection; name it in adacc.compact.layers to serve it"
        if reason is not None:
            left[name] = reason
        else:
            chosen.append(Chosen(name, module, _rank(name, module, config), _scale(name, config)))
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left.items())
        raise ConfigError(
            f"adacc.compact: no layer to serve ({reasons or 'the blocks have no weight matrix'}); "
            "change adacc.compact.layers, or remove adacc.compact"
        )
    return chosen, left


def _matrices(blocks: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """The modules in the blocks that have a weight matrix of their own, with their names."""
    for name, block in blocks.items():
        for inner, module in block.named_modules(prefix=name, remove_duplicate=False):
            weight = module._parameters.get("weight")
            if weight is not None and len(whole_shape(weight)) > 1 and not isinstance(module, nn.Embedding):
                yield inner, module


def _uses(model: nn.Module) -> dict[int, list[str]]:
    """By the `id` of a parameter, all names that it has in the model."""
    uses: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    return uses


def _why_not(name: str, module: Any, uses: Mapping[int, list[str]], trained: Collection[int]) -> str | None:
    weight = module.weight
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}, not an nn.Linear"
    others = [other for other in uses[id(weight)] if other != f"{name}.weight"]
    if others:
        return f"its weight is tied to {others[0]}"
    if not weight.requires_grad:
        return "its weight is frozen, so that it saves no input"
    if id(weight) not in trained:
        return "its weight is not among the parameters to train"
    if not weight.is_contiguous():
        return "its weight is not contiguous"
    if "lora_" in name:
        return "a LoRA adapter, small as it is"
    if not getattr(weight, "allreduce", True) or _is_in_mixture(name, uses):
        return "part of a mixture of experts"
    return None


def _is_in_mixture(name: str, uses: Mapping[int, list[str]]) -> bool:
    """Whether a module around the layer has experts. Routers need exact gradients, and experts see few tokens."""
    parents = name.split(".")[:-1]
    around = tuple(".".join(parents[:length]) + ".experts." for length in range(1, len(parents) + 1))
    return "experts" in parents or any(each.startswith(around) for names in uses.values() for each in names)


def _is_attention_output(name: str) -> bool:
    """By its name, whether it is the output projection of attention, which the paper leaves as it is."""
    *parents, leaf = [part for part in name.split(".") if not part.isdecimal()]
    around = ".".join(parents).lower()
    if any(word in around for word in _ATTENTION):
        return leaf in _OUTPUT_IN_ATTENTION
    return leaf in _OUTPUT_ANYWHERE and not any(word in around for word in _MLP)


def _rank(name: str, layer: nn.Linear, config: CompactConfig) -> int:
    features = whole_shape(layer.weight)[1]
    if isinstance(config.rank, float):
        return max(round(config.rank * features), 1)
    if config.rank > features:
        raise ConfigError(
            f"adacc.compact.rank = {config.rank}: must be at most {features}, the input features of layer {name!r}; or "
            "a fraction, such as 0.25"
        )
    return config.rank


def _scale(name: str, config: CompactConfig) -> float:
    if not isinstance(config.scale, Mapping):
        return config.scale
    fitting = (scale for pattern, scale in config.scale.items() if fnmatchcase(name, pattern))
    return next(fitting, COMPACT_SCALE)


def _listed(names: list[str]) -> str:
    return f"; they are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ", which have none"
