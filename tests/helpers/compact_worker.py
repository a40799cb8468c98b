"""One rank of the tests of CompAct under DeepSpeed: trains, saves and resumes, and tells what it saw."""

from __future__ import annotations

import deepspeed
import torch
from compact_reference import Reference, whole_batch_gradients
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from replayed import replayed
from zero_cases import Case, ds_config
from zero_models import Model, batch

import ds_adacc
from ds_adacc.compact.linear import PROXY

STEPS, ACCUMULATION, RANK, INTERVAL, SCALE, DECAY, CLIP, RATE = 4, 2, 8, 2, 0.5, 0.1, 0.8, 1e-2
COMPACT = {"rank": RANK, "update_interval": INTERVAL, "scale": SCALE}
OVERFLOW = 2  # the step that overflows, in fp16, counted from 0
EXACT = (
    Case(0),
    Case(1, further=True),
    Case(2, offload="optimizer"),
    Case(3),
    Case(3, offload="optimizer, parameters", persistent=True),
)
ROUNDED = (Case(0, "bf16", further=True), Case(0, "fp16"), Case(1, "bf16"), Case(3, "fp16"))
FROZEN = (Case(0), Case(1), Case(3))
RESUMED = (Case(0), Case(2, "bf16"), Case(3, "bf16"))
SAVED_AFTER = 2


def label(case):
    return f"{case.stage} {case.precision} {case.offload}".strip()


def new_model():
    torch.manual_seed(0)
    model = Model(layers=2)
    for block in model.blocks:
        block.drop.p = 0.0  # ranks would drop other elements than the reference
    return model


def config(case, compact=COMPACT, budget=1.0):
    section = {"memory_budget": budget, "codecs": "none", "solver": {"max_seconds": 30.0}}
    section |= {"compact": compact} if compact else {}
    found = ds_config(case, section) | {"gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": CLIP}
    found["optimizer"] = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY, "torch_adam": True}}
    warm_up = {"warmup_min_lr": RATE / 2, "warmup_max_lr": RATE, "warmup_num_steps": 4, "warmup_type": "linear"}
    return found | {"scheduler": {"type": "WarmupLR", "params": warm_up}}


def engine_of(case, **options):
    model = new_model()
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=config(case, **options))
    return engine


def micro_batch(step, micro, rank):
    return batch(torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def take_step(engine, step, overflow=False):
    losses = []
    for micro in range(ACCUMULATION):
        loss = engine(micro_batch(step, micro, engine.global_rank))
        engine.backward(loss * float("inf") if overflow else loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine):
    """The model's state dict, whole, in fp32."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=engine.zero_optimization_stage() == 3):
        return {name: value.detach().float().clone() for name, value in engine.module.state_dict().items()}


def state_of(engine):
    """Whether proxies and their masters are zero, and how many elements Adam's first moments have on this rank."""
    proxies = [layer.compact_update for layer in engine.adacc.compact.layers.values()]
    enabled = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(proxies, enabled=enabled):
        rest = sum(proxy.abs().sum().item() for proxy in proxies)
    masters = [deepspeed.utils.safe_get_full_fp32_param(proxy) for proxy in proxies]
    rest += sum(master.abs().sum().item() for master in masters if master is not None)
    return {"left": rest, "moments": sum(state["exp_avg"].numel() for state in engine.basic_optimizer.state.values())}


def beside_reference(case):
    engine, model = engine_of(case), new_model()
    compact = engine.adacc.compact
    assert list(engine.module.state_dict()) == list(model.state_dict())
    reference = Reference(model, compact.ranks, compact.seed, INTERVAL, SCALE, DECAY, CLIP)
    errors, rates, losses = [], [], []
    for step in range(STEPS):
        rates.append(engine.get_lr()[0])
        losses.append(take_step(engine, step))
        everyone = [micro_batch(step, micro, rank) for micro in range(ACCUMULATION) for rank in range(2)]
        whole_batch_gradients(model, everyone)
        reference.step(rates[-1])
        mine, theirs = weights(engine), model.state_dict()
        off = {name: ((mine[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in mine}
        # A key's bias has a gradient of zero in exact arithmetic. Adam turns its rounding errors into steps.
        errors.append(max(error for name, error in off.items() if not name.endswith("qkv.bias")))
    moved = max((mine[name] - value).abs().max().item() for name, value in new_model().state_dict().items())
    seen = {"errors": errors, "rates": rates, "losses": losses, "moved": moved}
    return {**seen, "held": engine.adacc.observed_held_bytes, **state_of(engine)}


def rounded(case):
    """A run in 16 bits: its weights, before and after a step that overflows (in fp16), and at the end."""
    engine, kept = engine_of(case), []
    for step in range(STEPS):
        before = weights(engine)
        take_step(engine, step, overflow=case.precision == "fp16" and step == OVERFLOW and engine.global_rank == 1)
        after = weights(engine)
        kept.append([name for name in after if torch.equal(after[name], before[name])])
    finite = all(value.isfinite().all().item() for value in after.values())
    return {"kept": kept, "skipped": engine.skipped_steps, "sum": digest(after), "finite": finite, **state_of(engine)}


def resumed(case, folder):
    """The losses and weights of a run, and of another that goes on from its checkpoint."""
    whole = engine_of(case)
    losses = []
    for step in range(STEPS):
        losses.append(take_step(whole, step))
        if step + 1 == SAVED_AFTER:
            whole.save_checkpoint(folder, tag="saved")
            exported = exported_from(whole, folder)
    torch.manual_seed(7)
    part = engine_of(case)
    part.adacc.compact.continue_from(123, 0)  # another seed: that of the checkpoint counts
    part.load_checkpoint(folder, tag="saved")
    again = [take_step(part, step) for step in range(SAVED_AFTER, STEPS)]
    return {"losses": losses, "again": again, "sums": [digest(weights(whole)), digest(weights(part))], **exported}


def frozen(case):
    """The norms of two layers' weights after each step. The script freezes the block of the first after two."""
    engine, norms = engine_of(case), []
    for step in range(4):
        if step == 2:
            engine.module.blocks[0].requires_grad_(False)
        take_step(engine, step)
        whole = weights(engine)
        norms.append([whole[f"blocks.{block}.fc1.weight"].norm().item() for block in range(2)])
    return norms


def exported_from(engine, folder):
    """Whether a plain model takes the weights that were saved or exported, and the proxies that are among them."""
    if engine.zero_optimization_stage() == 3:
        found = engine._zero3_consolidated_16bit_state_dict()
    else:
        found = torch.load(folder / "saved" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    whole, model = weights(engine), new_model()
    if found is not None:  # of ZeRO-3 the first rank alone has it
        model.load_state_dict(found)
        assert all(torch.equal(value.float(), whole[name]) for name, value in model.state_dict().items())
    if engine.zero_optimization_stage() > 0:  # what DeepSpeed's script zero_to_fp32.py puts together
        merged = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="saved")
        proxies = {name for name in merged if name.endswith(PROXY)}
        assert not any(merged[name].any() for name in proxies)
        model.load_state_dict({name: value for name, value in merged.items() if name not in proxies})
        served = (f"{name}.weight" for name in engine.adacc.compact.layers)
        assert all(torch.equal(merged[name].float(), whole[name]) for name in served)
    some = without_frozen(engine, engine.module.blocks[0].fc1)
    return {name: state and list(state) for name, state in (("exported", found), ("without_frozen", some))}


def without_frozen(engine, layer):
    """The weights that are exported without frozen parameters, while this layer is frozen."""
    frozen = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    is_partitioned = engine.zero_optimization_stage() == 3
    export = engine._zero3_consolidated_16bit_state_dict if is_partitioned else engine.module_state_dict
    found = export(exclude_frozen_parameters=True)
    for parameter in frozen:
        parameter.requires_grad_(True)
    assert not any(each.weight.requires_grad for each in engine.adacc.compact.layers.values())
    return found


def refused(folder):
    """What is said of a checkpoint whose optimizer states have other shapes, and of one without the weights."""
    narrow, none = engine_of(Case(0), compact=COMPACT | {"rank": 4}), engine_of(Case(0), compact=None)
    said = []
    for engine in (narrow, none):
        before = weights(engine)
        try:
            engine.load_checkpoint(folder, tag="saved")
        except ValueError as error:
            said.append(str(error))
        assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
        engine.load_checkpoint(folder, tag="saved", load_module_only=True)
    assert digest(weights(narrow)) == digest(weights(none))
    none.save_checkpoint(folder, tag="plain")
    for attempt in (
        lambda: narrow.load_checkpoint(folder, tag="plain"),
        lambda: narrow.save_checkpoint(folder, tag="left out", exclude_frozen_parameters=True),
    ):
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))
    return said


def module_only(folder):
    """What is said where DeepSpeed would load nothing but frozen weights, and whether all weights stay as they are."""
    engine = engine_of(Case(3))
    before = weights(engine)
    try:
        engine.load_checkpoint(folder, tag="saved", load_module_only=True)
    except ValueError as error:
        return str(error), digest(weights(engine)) == digest(before)


def digest(tensors):
    return {name: value.double().sum().item() for name, value in tensors.items()}


def planned(case):
    """The losses under a lossless plan that recomputes, and what it holds."""
    engine = engine_of(case, budget=0.65)
    losses = [take_step(engine, step) for step in range(STEPS)]
    return {
        "losses": losses,
        "replays": replayed(engine.adacc.runtime.controller.plan),
        "held": engine.adacc.observed_held_bytes,
    }


def plain_sgd(compact):
    """The weights after some steps of SGD."""
    made = config(Case(0), compact=compact)
    made["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
    model = new_model()
    engine, *_ = ds_adacc.initialize(model=model, model_parameters=model.parameters(), config=made)
    for step in range(STEPS):
        take_step(engine, step)
    return weights(engine)


def orthonormal():
    """How far SGD with an orthonormal projection is from SGD without one."""
    plain = plain_sgd(None)
    full = plain_sgd(
        {"rank": 0.999, "update_interval": None, "scale": 1.0}
    )  # rounded: as many features as the input has
    return max(((full[name] - plain[name]).norm() / plain[name].norm()).item() for name in plain)


def main(out, *run):
    get_accelerator().is_fp16_supported = lambda: True  # the CPU's operators take fp16; DeepSpeed asks for AVX-512
    deepspeed.init_distributed(dist_backend="gloo")
    return {
        "exact": {label(case): beside_reference(case) for case in EXACT if label(case) in run},
        "rounded": {label(case): rounded(case) for case in ROUNDED if label(case) in run},
        "resumed": {label(case): resumed(case, out / label(case)) for case in RESUMED},
        "frozen": {label(case): frozen(case) for case in FROZEN},
        "refused": refused(out / label(RESUMED[0])),
        "module only": module_only(out / label(RESUMED[2])),
        "planned": planned(Case(3)),
        "orthonormal": orthonormal(),
    }
