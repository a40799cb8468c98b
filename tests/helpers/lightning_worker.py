"""The test with Lightning: its Trainer with DeepSpeedStrategy, plain or with a callback that attaches ds_adacc."""

from __future__ import annotations

import deepspeed
import families
import lightning.pytorch as lightning
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from replayed import replayed

import ds_adacc

SECTION = {"memory_budget": 0.5, "codecs": "none", "solver": {"max_seconds": 30.0}}
BATCHES, LENGTH = 6, 16


class OnHost(DeepSpeedStrategy):
    """Lightning starts DeepSpeed on CUDA devices only. What it asks for there is left out."""

    @property
    def root_device(self):
        return torch.device("cpu", 0)

    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    def setup_distributed(self):
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Attach(lightning.Callback):
    """What the README tells a user to write."""

    def on_fit_start(self, trainer, pl_module):
        ds_adacc.attach(trainer.strategy.model)


class Leaves(lightning.Callback):
    """Makes the blocks leaf modules of ZeRO-3, as ds_adacc does: gradients are added up in their order."""

    def setup(self, trainer, pl_module, stage):
        layers = pl_module.model.model.layers
        deepspeed.utils.set_z3_leaf_modules(pl_module, [type(layers[0])])


class Language(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.model, _ = families.example("llama")
        self.losses = []

    def training_step(self, tokens, _):
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, tokens, _):
        self.log("validation", self.model(input_ids=tokens, labels=tokens).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(out, stage, served, epochs, resumed=None):
    """The losses of a fit, two micro-batches in each step, and the plan in force at its end; it saves a checkpoint."""
    config = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    config |= {"zero_force_ds_cpu_optimizer": False} | ({"adacc": SECTION} if served else {})
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=OnHost(config=config, logging_batch_size_per_gpu=2),
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[Attach()] if served else [Leaves()],
        default_root_dir=out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    tokens = torch.randint(0, 50, (2 * BATCHES, LENGTH), generator=torch.Generator().manual_seed(2))
    model, loader = Language(), torch.utils.data.DataLoader(tokens, batch_size=2)
    trainer.fit(model, loader, loader, ckpt_path=resumed)
    saved = str(out / f"zero{stage}-{served}-{epochs}.ckpt")
    trainer.save_checkpoint(saved)
    plan = trainer.strategy.model.adacc.runtime.controller.plan if served else None
    replays = sum(map(len, replayed(plan))) if plan else 0
    return {"losses": model.losses, "replays": replays, "saved": saved}


def main(out, *stages):
    """By stage, without and with ds_adacc: a whole run, its first half, and the other half, resumed from that."""
    results = {}
    for stage in map(int, stages):
        results[stage] = []
        for served in (False, True):
            whole, begun = train(out, stage, served, 2), train(out, stage, served, 1)
            results[stage].append([whole, begun, train(out, stage, served, 2, begun["saved"])])
    return results
