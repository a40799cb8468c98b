"""Several engines in one process, each of a model of its own, as in a GAN."""

import logging

import pytest
from fake_engine import Engine
from torch import nn
from translator import Translator

import ds_adacc
from ds_adacc.engine import api as engine
from ds_adacc.engine import serving
from ds_adacc.report.journal import latest, read


class Other(Translator):
    """Its blocks have the names and the class of the translator's."""


@pytest.fixture
def initialize(monkeypatch, afresh):
    """`ds_adacc.initialize` with engines that cannot step."""
    monkeypatch.setattr(engine, "deepspeed_initialize", lambda model, **_: (Engine(model), None, None, None))
    monkeypatch.setattr(serving, "patch_engine", lambda *_: None)
    return lambda model: ds_adacc.initialize(model=model, config={"adacc": {}})[0]


def told(caplog, engine):
    """What the log says of an engine none of whose blocks has run."""
    caplog.clear()
    engine.adacc.end_step()
    (line,) = caplog.messages
    return line


def test_the_log_names_each_of_several_engines(initialize, caplog):
    caplog.set_level(logging.INFO, logger="ds_adacc")
    first = initialize(Translator())
    assert caplog.messages[0].startswith("5 blocks found: ")
    caplog.clear()
    second = initialize(Other())
    assert caplog.messages[0].startswith("engine 2 (Other): 5 blocks found: ")
    assert told(caplog, second).startswith("engine 2 (Other): adacc is enabled but does nothing: ")
    assert told(caplog, first).startswith("engine 1 (Translator): adacc is enabled but does nothing: ")


def test_an_only_engine_is_not_named(initialize, caplog):
    assert told(caplog, initialize(Translator())).startswith("adacc is enabled but does nothing: ")


def test_the_journal_names_the_model(initialize, monkeypatch):
    monkeypatch.setattr(Engine, "__init__", on_first_rank(Engine.__init__))
    initialize(nn.Sequential(Other()))
    initialize(Other())
    assert read(latest())[0]["model"] == "Other"


def on_first_rank(init):
    def new(self, model):
        init(self, model)
        self.global_rank = 0

    return new
