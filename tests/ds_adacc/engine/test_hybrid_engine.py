"""DeepSpeed's hybrid engine gives its layers other forwards while it generates."""

from types import SimpleNamespace

import pytest
import torch
import zoo
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from fake_engine import Engine
from torch import nn

import ds_adacc
from ds_adacc.engine import api as engine
from ds_adacc.engine import serving
from ds_adacc.runtime.wrap import is_wrapped, runs

OFF = {"adacc": {"enabled": False}}


class Hybrid(DeepSpeedHybridEngine):
    """DeepSpeed's, with stand-ins for the layers of its kernels, which need CUDA."""

    def __init__(self, model):
        nn.Module.__init__(self)
        for name, value in vars(Engine(model)).items():
            setattr(self, name, value)
        self._config = SimpleNamespace(
            hybrid_engine=SimpleNamespace(inference_tp_size=1), zero_config=None, aio_config=0
        )
        self._inference_containers, self._orig_modules, self._orig_fwds = [], [], []
        self._t_start = self._decode_graphs = None
        self.Z3_enabled = False
        model.generate = lambda: None
        self.create_inference_module()

    def populate_all_inference_policies(self):
        self.inference_policies = {zoo.GPTBlock: (self.new_inference_container, None)}

    def new_inference_container(self, layer, policy, place):
        nothing = dict.fromkeys(("transform_for_inference", "transform_for_training"), lambda: None)
        params = {"get_all_params": list, "get_lora_params": list}
        return SimpleNamespace(module=nn.Identity(), **nothing, **params)

    zero_optimization_stage = Engine.zero_optimization_stage
    gradient_accumulation_steps = Engine.gradient_accumulation_steps

    def destroy(self):
        pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(zoo.GPTBlock() for _ in range(2))


@pytest.fixture
def initialize(monkeypatch, afresh):
    monkeypatch.setattr(engine, "deepspeed_initialize", lambda model, **_: (Hybrid(model), None, None, None))
    monkeypatch.setattr(serving, "patch_engine", lambda *_: None)
    return lambda model, config: ds_adacc.initialize(model=model, config=config)[0]


def test_blocks_are_served_again_after_generation(initialize):
    hybrid = initialize(model := Model(), {"adacc": {}})
    hybrid.eval()
    x = torch.ones(1)
    assert not any(map(is_wrapped, model.blocks)) and model.blocks[0](x) is x
    hybrid.train()
    assert all(runs(hybrid.adacc.runtime, block) for block in model.blocks)


def test_the_last_hybrid_engine_of_a_model_decides_after_generation_too(initialize):
    initialize(model := Model(), {"adacc": {}})
    last = initialize(model, OFF)
    last.eval()
    last.train()
    assert not any(map(is_wrapped, model.blocks))


def test_an_engine_that_generates_may_be_attached_to(initialize):
    hybrid = Hybrid(model := Model())
    hybrid.eval()
    ds_adacc.attach(hybrid, {"adacc": {}})
    hybrid.train()
    assert [block.forward.__func__ for block in model.blocks] == [zoo.GPTBlock.forward] * 2
