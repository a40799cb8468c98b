"""What the engine's optimizer trains: each proxy in the place of its weight, and the rates of its parameter group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_adacc.config import ConfigError

_TAG = "compact"  # a key of parameter groups: the names of the served layers whose proxies are in the group
_DECOUPLED = ("AdamW", "Lion", "Muon")  # parts of the names of optimizers without a flag for it
# Parts of the names of optimizers that read the values of parameters: the size, the distance so far, an average.
_READ_VALUES = ("adafactor", "lamb", "lars", "larc", "adamp", "sgdp", "asgd", "dog", "prodigy", "dadapt")
_READ_VALUES += ("schedulefree", "lookahead")

Group = dict[str, Any]


@dataclass(frozen=True)
class Rates:
    """The numbers of one step: the learning rate, and the factor of weight decay, which AdamW multiplies with it."""

    learning: float
    decay: float


def groups_of(model: nn.Module, model_parameters: Any, optimizer: Any) -> list[Group]:
    """The parameter groups, as lists, that `deepspeed.initialize` would train, given these arguments of it.

    Raises ValueError for an optimizer that has made steps already: its states have the shapes of the weights.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        if optimizer.state:
            raise ValueError("adacc.compact: the optimizer has made steps already; give a new one")
        return optimizer.param_groups
    given: list[Any] = list(model.parameters() if model_parameters is None else model_parameters)
    if given and isinstance(given[0], Mapping):
        return [{**group, "params": _listed(group["params"])} for group in given]
    return [{"params": given}]


def exchange(groups: Sequence[Group], proxies: Mapping[int, tuple[str, nn.Parameter]]) -> Callable[[], None]:
    """Put each proxy in the place of its weight. `proxies`: by the `id` of the weight, the layer's name and proxy.

    The function that this returns undoes it, whatever DeepSpeed has done to the groups since.
    """
    before = [list(group["params"]) for group in groups]
    for group in groups:
        found = [proxies[id(parameter)][0] for parameter in group["params"] if id(parameter) in proxies]
        group["params"] = [proxies.get(id(p), ("", p))[1] for p in group["params"]]
        if found:
            group[_TAG] = found

    def exchange_back() -> None:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters
            group.pop(_TAG, None)

    return exchange_back


def rates(optimizer: Any) -> dict[str, Rates]:
    """By the layer's name, the rates that the optimizer's next step uses."""
    return {
        name: Rates(float(group["lr"]), float(group.get("weight_decay", 0.0)))
        for group in optimizer.param_groups
        for name in group.get(_TAG, ())
    }


def refuse_coupled_decay(optimizer: Any) -> None:
    """Raises ConfigError if a proxy's group has a weight decay that the optimizer adds to gradients.

    The proxy is zero at every step, so the optimizer's own decay never does anything. Decoupled decay of W is a factor
    of W, which the step boundary applies. Decay within the gradient would have to pass through the moments.
    """
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0.0)
        if group.get(_TAG) and decay and not _is_decoupled(optimizer, group):
            raise ConfigError(
                f"adacc.compact: weight_decay = {decay} of {type(optimizer).__name__} is added to the gradient, which "
                "cannot be done for compressed gradients; use AdamW, or a weight_decay of 0 for these layers"
            )


def refuse_reading_values(optimizer: Any) -> None:
    """Raises ConfigError if the optimizer reads the values of the parameters that it trains. It is known by its name.

    The proxy is zero at every step. So a step that is made in proportion to the weight, as Adafactor's and LAMB's are,
    would be near zero.
    """
    names = [cls.__name__.lower() for cls in type(optimizer).__mro__]
    if not any(word in name for word in _READ_VALUES for name in names):
        return
    for group in optimizer.param_groups:
        scales = group.get("scale_parameter")  # a flag of the Adafactor of transformers: without it no value is read
        if group.get(_TAG) and scales is not False:
            more = "set its scale_parameter to False, or " if scales else ""
            raise ConfigError(
                f"adacc.compact: the optimizer {type(optimizer).__name__} reads the values of the weights, and CompAct "
                f"gives it proxies, which are zero; {more}use one that reads gradients only, such as AdamW, SGD, Lion "
                'or Muon, or remove "compact" from the section'
            )


def _is_decoupled(optimizer: Any, group: Group) -> bool:
    asked = group.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", None))
    return bool(asked) if asked is not None else any(word in type(optimizer).__name__ for word in _DECOUPLED)


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
