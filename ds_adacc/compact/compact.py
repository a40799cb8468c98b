"""The served layers of one engine, the seed of their projections, and what happens to them at step boundaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from ds_adacc.compact.boundary import add_update, reset
from ds_adacc.compact.choice import Chosen, choose
from ds_adacc.compact.linear import CompactLinear, serve, unserve
from ds_adacc.compact.optimized import (
    Group,
    Rates,
    exchange,
    rates,
    refuse_coupled_decay,
    refuse_reading_values,
)
from ds_adacc.compact.projection import draw, key_of
from ds_adacc.compact.shared import Shared, partners
from ds_adacc.config import CompactConfig, ConfigError
from ds_adacc.log import get_logger

_SHOWN = 4  # layers that a line of the log names


class Compact:
    """Serves the layers that `choose` has chosen, for one engine.

    `seed` is the run's: every projection follows from it, the layer's name and the epoch, which is the number of the
    engine's applied steps over `update_interval`. It is the same on all ranks. Layers that read the same tensor have
    the projection of the first of them. In `groups`, which the optimizer trains, proxies take the place of the weights.
    """

    def __init__(self, config: CompactConfig, chosen: Sequence[Chosen], groups: Sequence[Group]) -> None:
        self.config = config
        self.seed = 0
        self._first = partners(one.name for one in chosen)
        readers = Counter(self._first.values())
        shared = {name: Shared(count) for name, count in readers.items()}
        self.layers: dict[str, CompactLinear] = {
            one.name: serve(one.layer, one.rank, shared[self._first[one.name]]) for one in chosen
        }
        self._scales = {one.name: one.scale for one in chosen}
        self._epoch: int | None = None
        proxies = {id(layer.weight): (name, layer.compact_update) for name, layer in self.layers.items()}
        self._exchange_back = exchange(groups, proxies)
        self._is_known_to_train = False

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of each layer's projection, by name."""
        return {name: len(layer.columns) for name, layer in self.layers.items()}

    def draw(self, applied_steps: int) -> None:
        """Draw the projections that are due after so many applied steps, unless they are drawn already."""
        interval = self.config.update_interval
        epoch = 0 if interval is None else applied_steps // interval
        if epoch == self._epoch:
            return
        self._epoch = epoch
        for name, layer in self.layers.items():
            first = self.layers[self._first[name]]
            if layer is not first and (len(layer.rows), len(layer.columns)) == (len(first.rows), len(first.columns)):
                # The same tensors: by them torch.compile knows that the projections are the same.
                layer.rows, layer.columns = first.rows, first.columns
            else:
                rows, columns = draw(self.seed, self._first[name], epoch, len(layer.rows), len(layer.columns))
                layer.rows.copy_(rows)
                layer.columns.copy_(columns)

    def begin(self, engine: Any, seed: int) -> None:
        """Draw the first projections. `seed` must be the same on all ranks.

        Raises ConfigError if the optimizer cannot train proxies.
        """
        optimizer = engine.basic_optimizer
        missing = set(self.layers) - set(rates(engine.optimizer))
        if missing:
            raise ConfigError(
                f"adacc.compact: the optimizer {type(optimizer).__name__} does not train the proxy of layer "
                f"{min(missing)!r}; it must keep the parameter groups that it is given"
            )
        refuse_reading_values(optimizer)
        refuse_coupled_decay(optimizer)
        self.continue_from(seed, 0)

    def undo(self) -> None:
        """Leave the layers, and the groups that `convert` was given, as they were before it: no engine came of it."""
        self._exchange_back()
        for layer in self.layers.values():
            unserve(layer)

    def continue_from(self, seed: int, applied_steps: int) -> None:
        """Take the seed of a saved run, or a new one, and draw the projections of this point of the run."""
        self.seed, self._epoch = seed, None
        self.draw(applied_steps)

    def rates_of(self, optimizer: Any) -> dict[str, Rates]:
        """The rates of the step that the engine's optimizer is about to make, by layer.

        An optimizer that trains a proxy itself, as in fp32 without ZeRO, leaves it alone if it has no gradient. Then
        the weight does not decay, as without CompAct. DeepSpeed's other optimizers take zeros for a missing gradient.
        """
        found = rates(optimizer)
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, layer in self.layers.items():
            if layer.compact_update.grad is None and id(layer.compact_update) in trained:
                found[name] = replace(found[name], decay=0.0)
        return found

    def end_step(self, engine: Any, of_step: Mapping[str, Rates]) -> None:
        """After an optimizer step that was applied: update the weights, and draw new projections if they are due.

        `of_step`: the `rates_of` that step, read before it: schedules change them. Every rank must call.
        """
        steps = applied_steps(engine)
        moved = {}
        for name, layer in self.layers.items():
            decay = of_step[name].learning * of_step[name].decay
            key = key_of(self.seed, "rounding", name, steps)
            moved[name] = add_update(layer, self._scales[name], decay, key)
        reset(engine, [layer.compact_update for layer in self.layers.values()])
        if not self._is_known_to_train:
            self._look_at_first_update([name for name in moved if of_step[name].learning and not moved[name]])
            self._is_known_to_train = any(rates.learning for rates in of_step.values())
        self.draw(steps)

    @contextmanager
    def weights_as_trained(self) -> Iterator[None]:
        """Have each layer's weight say that it requires a gradient, if the layer's proxy does; put that back after."""
        weights = [layer.weight for layer in self.layers.values() if layer.compact_update.requires_grad]
        try:
            for weight in weights:
                weight.requires_grad_(True)
            yield
        finally:
            for weight in weights:
                weight.requires_grad_(False)

    def _look_at_first_update(self, still: Sequence[str]) -> None:
        """Warn of layers that the first step did not change: the model may read their weights by itself."""
        if still:
            get_logger().warning(
                "adacc.compact: the first step left the weight of %s unchanged (such layers: %d). If the model reads "
                "the weight without calling the layer, it never trains: leave it out of adacc.compact.layers",
                still[0],
                len(still),
            )


def convert(
    model: nn.Module, blocks: Mapping[str, nn.Module], config: CompactConfig, groups: Sequence[Group]
) -> Compact:
    """Serve layers of the blocks, in place, and put their proxies in the place of their weights in `groups`.

    Raises ConfigError, as `choose` does, before anything is changed.
    """
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    chosen, left = choose(model, blocks, config, trained)
    compact = Compact(config, chosen, groups)
    _log_layers(compact, left)
    return compact


def refuse_served(model: nn.Module) -> None:
    """For an engine that is to train the model. Raises ConfigError if an earlier engine's CompAct serves a layer of it.

    The new optimizer would train the layer's proxy, and nothing would add that to the weight. The earlier engine may
    still train, so its layers are not taken from it.
    """
    name = next((name for name, module in model.named_modules() if isinstance(module, CompactLinear)), None)
    if name is not None:
        raise ConfigError(
            f"adacc.compact: an earlier engine has changed the layer {name!r} of this model, and no other engine can "
            "train it: its weight is frozen, and a proxy is trained in its place. Make a new model for the new engine, "
            "and load the state dict of this one into it"
        )


def applied_steps(engine: Any) -> int:
    """The engine's optimizer steps that were not skipped for an overflow."""
    return engine.global_steps - engine.skipped_steps


def _log_layers(compact: Compact, left: Mapping[str, str]) -> None:
    log, names = get_logger(), list(compact.layers)
    shown = ", ".join(f"{name} ({compact.ranks[name]})" for name in names[:_SHOWN])
    more = ", ..." if len(names) > _SHOWN else ""
    log.info(
        "compact: Linear layers that save a projection of their input: %d, with their ranks %s%s",
        len(names),
        shown,
        more,
    )
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, layers in by_reason.items():
        log.info("compact: left alone, %s: %d, such as %s", reason, len(layers), layers[0])
