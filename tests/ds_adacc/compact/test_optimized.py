"""What the optimizer is given in place of the weights, in every form that `deepspeed.initialize` takes."""

import pytest
import torch
import transformers
from torch import nn

from ds_adacc.compact.optimized import Rates, exchange, groups_of, rates, refuse_coupled_decay, refuse_reading_values
from ds_adacc.config import ConfigError


def named(name):
    """An optimizer's class with this name."""
    return type(name, (torch.optim.SGD,), {})


def exchanged(given, model, optimizer=None):
    """The groups, with the first layer's weight exchanged, and its proxy."""
    proxy = nn.Parameter(torch.zeros(3, 1))
    groups = groups_of(model, given, optimizer)
    exchange(groups, {id(model[0].weight): ("0", proxy)})
    return groups, proxy


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def test_a_list_a_generator_and_nothing_become_one_group(model):
    for given in (list(model.parameters()), model.parameters(), None):
        (group,), proxy = exchanged(given, model)
        assert group["compact"] == ["0"]
        assert [id(p) for p in group["params"]] == [id(proxy), *map(id, list(model.parameters())[1:])]


def test_groups_keep_their_settings_and_the_given_ones_stay_as_they_are(model):
    given = [{"params": model[1].parameters(), "lr": 2.0}, {"params": model[0].weight, "weight_decay": 0.5}]
    (first, second), proxy = exchanged(given, model)
    assert "compact" not in first
    assert (first["lr"], len(first["params"])) == (2.0, 2)
    assert second["params"][0] is proxy
    assert given[1]["params"] is model[0].weight


def test_a_clients_optimizer_trains_the_proxy_and_tells_its_rates(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.1)
    groups, proxy = exchanged(None, model, optimizer)
    assert groups is optimizer.param_groups
    assert groups[0]["params"][0] is proxy
    assert rates(optimizer) == {"0": Rates(0.5, 0.1)}
    refuse_coupled_decay(optimizer)


def test_an_optimizer_that_has_made_steps_is_refused(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has made steps already"):
        groups_of(model, None, optimizer)


def test_decay_that_is_added_to_gradients_is_refused(model):
    for cls in (torch.optim.Adam, torch.optim.SGD):
        optimizer = cls(model.parameters(), lr=0.1, weight_decay=0.1)
        exchanged(None, model, optimizer)
        with pytest.raises(ConfigError, match=rf"weight_decay = 0\.1 of {cls.__name__} is added to the gradient"):
            refuse_coupled_decay(optimizer)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        refuse_coupled_decay(optimizer)


class TwoNames(torch.optim.Adafactor):
    """A class of the user's own, derived from one that is known."""


def steps_from(value, cls):
    """The steps that an optimizer makes with given gradients; the parameter is put back to `value` after each."""
    parameter = nn.Parameter(torch.full((4, 4), value, dtype=torch.float64))
    decay = {} if cls is torch.optim.Rprop else {"weight_decay": 0.0}
    optimizer, steps = cls([parameter], lr=0.01, **decay), []
    for seed in range(3):
        parameter.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).double()
        optimizer.step()
        steps.append(parameter.detach() - value)
        parameter.data.fill_(value)
    return torch.stack(steps)


def of_torch():
    """Torch's optimizers, but for one that has no given steps and one that takes sparse gradients."""
    classes = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    others = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    return [each for each in classes if issubclass(each, torch.optim.Optimizer) and each not in others]


def is_refused(model, cls):
    optimizer = cls(model.parameters() if cls is not torch.optim.Muon else [model[0].weight], lr=0.1)
    refuse_reading_values(optimizer)
    optimizer.param_groups[0]["compact"] = ["0"]
    try:
        refuse_reading_values(optimizer)
    except ConfigError as error:
        assert f"the optimizer {cls.__name__} reads the values of the weights" in str(error)
        assert "use one that reads gradients only, such as AdamW" in str(error)
        return True
    return False


@pytest.mark.parametrize("cls", [*of_torch(), TwoNames])
def test_an_optimizer_is_refused_if_its_steps_depend_on_the_values(model, cls):
    assert is_refused(model, cls) != torch.allclose(steps_from(0.0, cls), steps_from(1.0, cls), atol=1e-9)


def test_optimizers_that_run_on_a_gpu_only_are_known_by_name(model):
    assert all(is_refused(model, named(name)) for name in ("FusedLamb", "OnebitLamb", "PagedLAMB", "LARS", "LARC"))
    assert not any(is_refused(model, named(name)) for name in ("DeepSpeedCPUAdam", "FusedLion", "OnebitAdam"))


def test_the_adafactor_of_transformers_may_leave_out_the_values(model):
    optimizer = transformers.Adafactor(model.parameters())
    optimizer.param_groups[0]["compact"] = ["0"]
    with pytest.raises(ConfigError, match=r"Adafactor reads .* set its scale_parameter to False, or use one"):
        refuse_reading_values(optimizer)
    optimizer.param_groups[0]["scale_parameter"] = False
    refuse_reading_values(optimizer)
