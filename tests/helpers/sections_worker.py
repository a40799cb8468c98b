"""One rank of the test of unlike sections: what `initialize` and `attach` say of them, and that equal ones serve."""

from __future__ import annotations

import os

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from zero_cases import Case, ds_config
from zero_models import Model

import ds_adacc
from ds_adacc.config import ConfigError

SECTION = {"memory_budget": 0.5, "codecs": "none"}
OTHERS = {  # the second rank's section
    "equal": SECTION,
    "other budget": SECTION | {"memory_budget": 0.4},
    "other rectifier": SECTION | {"rectifier": {"enabled": False}},
    "none": None,
    "disabled": SECTION | {"enabled": False},
}


def said(case, attach):
    """What is said where the second rank has this section."""
    section = OTHERS[case] if int(os.environ["RANK"]) == 1 else SECTION
    model, config = Model(layers=2), ds_config(Case(1), None)
    served = config | ({"adacc": section} if section else {})
    start = deepspeed.initialize if attach else ds_adacc.initialize
    try:
        given = config if attach else served
        engine, *_ = start(model=model, model_parameters=model.parameters(), config=given)
        if attach:
            ds_adacc.attach(engine, served)
    except ConfigError as error:
        return str(error)
    return f"{len(engine.adacc.blocks)} blocks on {engine.adacc.runtime.controller.ranks.size} ranks"


class Apart:
    """An `mpu` by which each rank is a group of its own."""

    def __init__(self):
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self.get_data_parallel_group = self.get_model_parallel_group = lambda: groups[dist.get_rank()]
        self.get_data_parallel_world_size = self.get_model_parallel_world_size = lambda: 1
        self.get_data_parallel_rank = self.get_model_parallel_rank = lambda: 0


def alone():
    """Whether the first rank alone can make an engine."""
    model, mpu = Model(layers=2), Apart()
    if dist.get_rank() == 0:
        ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=ds_config(Case(1), None), mpu=mpu)
    dist.barrier()
    return True


def stages():
    """How many ranks plan with each of two stages, whose sections differ."""
    layers = [LayerSpec(nn.Linear, 8, 8)] * 4
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    config = ds_config(Case(1), SECTION | {"memory_budget": (0.5, 0.4)[dist.get_rank()], "blocks": ["Linear"]})
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine.adacc.runtime.controller.ranks.size


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    results = {case: said(case, attach=False) for case in OTHERS}
    # `attach` without a section raises an error on that rank alone, which ends the program.
    results |= {f"attach {case}": said(case, attach=True) for case in OTHERS if case != "none"}
    results |= {"alone": alone(), "stages": stages()}
    return results
