"""Which calls are given the same memory."""

import torch

from ds_adacc.steps import given_inputs
from ds_adacc.steps.given_inputs import GivenInputs

LAYERS = 6


def test_an_input_is_known_again_while_it_lives_and_nobody_has_written_to_it(monkeypatch):
    given = GivenInputs()
    one, other, mask = torch.zeros(3, requires_grad=True) * 1, torch.zeros(3, requires_grad=True) * 1, torch.ones(3)
    assert given.held([one, mask]) == ()
    assert given.add("first", {0: mask, 1: one, 2: one}) == []
    assert given.held([other, mask, one]) == (2,)
    assert given.add("second", {0: other, 1: mask, 2: one}) == [("first", 1)]
    assert given.held([one[:2], one.view(3, 1), one.double()]) == ()
    one.mul_(2)
    assert given.held([one]) == ()
    monkeypatch.setattr(given_inputs, "_memory", lambda tensor: ("the same address", 0, 0))
    assert given.add("third", {0: other}) == []
    assert given.held([other]) == (0,)
    del other
    assert given.held([torch.zeros(3, requires_grad=True) * 1]) == ()


def test_views_with_gaps_count_once_if_they_keep_nearly_the_same_memory_alive():
    given = GivenInputs()
    tokens, layers = (torch.zeros(shape, requires_grad=True) * 1 for shape in ((4, 32, LAYERS, 8), (LAYERS, 4, 32, 16)))
    assert given.add("first", {0: tokens[:, :, 0], 1: layers[0, :, :, :8]}) == []
    assert given.held([tokens[:, :, 1], layers[0, :, :, 8:], layers[1, :, :, :8], tokens[2:, :, 1]]) == (0, 1, 3)
    assert given.add("second", {0: layers[1, :, :, :8], 1: tokens[:, :, LAYERS - 1]}) == [("first", 0)]
    assert given.held([layers[1, :, :, 8:], layers[1:3, :, :, 8:]]) == (0,)
    del layers
    again = torch.zeros(LAYERS, 4, 32, 16, requires_grad=True) * 1
    assert given.held([again[0, :, :, 8:]]) == ()


def test_what_autograd_does_not_save_is_held_for_blocks_of_one_class():
    """A UNet's skip is given to blocks of two classes, of which often only one is recomputed from it."""
    given, one = GivenInputs(), torch.zeros(3, requires_grad=True) * 1
    assert given.add("down", {0: one}, {0}, "(Down)") == []
    assert given.held([one], "(Down)") == (0,)
    assert given.held([one], "(Up)") == ()
    assert given.add("up", {0: one}, (), "(Up)") == []
    assert given.held([one], "(Head)") == (0,)
    assert given.add("head", {0: one}, {0}, "(Head)") == [("up", 0)]
    assert given.owners([one], "(Down)") == [("down", 0)]
