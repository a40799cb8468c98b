"""What the optimizer is given in place of the weights, in every form that `deepspeed.initialize` takes."""

import pytest
import torch
from torch import nn

from ds_adacc.compact.optimized import Rates, exchange, groups_of, rates, refuse_coupled_decay
from ds_adacc.config import ConfigError


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
