"""One rank of the adoption tests: engines attached to, Hugging Face's Trainer, accelerate; tells their losses."""

from __future__ import annotations

import deepspeed
import families
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments
from zero_cases import Case, ds_config, trainer_config
from zero_models import Model
from zero_worker import account

import ds_adacc
from ds_adacc.huggingface import AdaccCallback

SECTION = {"memory_budget": 0.75, "codecs": "none", "solver": {"max_seconds": 2.0}}  # any plan will do
STEPS = 3
DS_INITIALIZE = deepspeed.initialize


def attached(stage, after=None):
    """Losses of an engine of deepspeed.initialize, attached to after some steps or never."""
    torch.manual_seed(0)
    model = Model()
    config = ds_config(Case(stage, micro_batches=2), SECTION)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    random = torch.Generator().manual_seed(engine.global_rank)
    losses = []
    for micro in range(2 * STEPS):
        if after is not None and micro == 2 * after:
            assert ds_adacc.attach(engine) is engine.adacc
        torch.manual_seed(100 * micro + engine.global_rank)
        loss = engine(torch.randint(64, (2, 16), generator=random))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "plan": account(engine)}


def refusals():
    """What attach says of what it does not take."""
    model = Model()
    config = ds_config(Case(1, micro_batches=2), None)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.randint(64, (2, 16))
    said = [_refusal(model), _refusal(engine), _refusal(engine, {"adacc": {"memory_budgett": 0.5}})]
    assert ds_adacc.attach(engine, {"adacc": {"enabled": False}}) is None
    engine.backward(engine(tokens))
    engine.step()
    said.append(_refusal(engine, {"adacc": SECTION}))
    engine.backward(engine(tokens))
    engine.step()
    adacc = ds_adacc.attach(engine, {"adacc": SECTION})
    assert ds_adacc.attach(engine, {"adacc": SECTION}) is adacc
    said += [_refusal(engine, {"adacc": SECTION | {"memory_budget": 0.5}}), _refusal(engine)]
    said.append(_refusal(engine, {"adacc": {"enabled": False}}))
    return said


def _refusal(engine, config=None):
    try:
        ds_adacc.attach(engine, config)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


class Telling(Trainer):
    """Keeps every loss as it is."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss


def trainer(stage, family, out, served):
    """Losses of a Trainer under ZeRO, plain or with the callback, a section and gradient checkpointing."""
    AcceleratorState._reset_state(reset_partial_state=True)
    model, inputs = families.example(family)
    rows = [{k: v[i] for k, v in families.another(inputs, seed).items()} for seed in range(16) for i in (0, 1)]
    config = trainer_config(stage, SECTION | {"blocks": "auto"} if served else None)
    arguments = TrainingArguments(
        str(out),
        deepspeed=config,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=served,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    work = Telling(model, arguments, train_dataset=rows, callbacks=[AdaccCallback()] if served else [])
    work.train()
    deepspeed.initialize = DS_INITIALIZE
    return {"losses": work.losses, "plan": account(work.model_wrapped)}


def accelerate(stage, attach):
    """Losses of a script that only calls `accelerator.prepare`, attached to or not."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = ds_config(Case(stage, micro_batches=2), SECTION) | {"zero_allow_untested_optimizer": True}
    del config["optimizer"]
    work = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    torch.manual_seed(0)
    model = Model()
    model, optimizer = work.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if attach:
        ds_adacc.attach(model)
    random = torch.Generator().manual_seed(work.process_index)
    losses = []
    for micro in range(2 * STEPS):
        torch.manual_seed(100 * micro + work.process_index)
        with work.accumulate(model):
            loss = model(torch.randint(64, (2, 16), generator=random))
            work.backward(loss)
            optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "plan": account(model)}


def trained(case, out):
    """Without ds_adacc, and with it."""
    match case:
        case "attach", stage, *late:
            return [attached(int(stage)), attached(int(stage), after=len(late))]
        case "accelerate", stage:
            return [accelerate(int(stage), attach) for attach in (False, True)]
        case "trainer", stage, family:
            return [trainer(int(stage), family, out, served) for served in (False, True)]


def main(out, *run):
    deepspeed.init_distributed(dist_backend="gloo")
    return {"refusals": refusals()} | {case: trained(case.split(), out) for case in run}
