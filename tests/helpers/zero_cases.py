"""What ZeRO is tested with: every option meets every other, not every combination is there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One training on two ranks.

    `model`: "gpt", "tied blocks" (a weight in two blocks), "frozen" (every other block), "llama" (transformers, its
    embedding tied to the head), "lora" (peft on the same). `offload`: what lies on the host: "", "optimizer" or
    "optimizer, parameters". `persistent`: whether stage 3 keeps small parameters whole. An fp16 run goes through an
    overflow. `further`: every value is in another case too, so this one is left for `--all`.
    """

    stage: int
    precision: str = "fp32"
    model: str = "gpt"
    micro_batches: int = 1
    overlap: bool = False
    offload: str = ""
    persistent: bool = False
    codecs: str = "none"
    further: bool = False

    @property
    def name(self) -> str:
        return f"{self.stage} {self.precision} {self.model} {self.codecs}"

    @property
    def reference_has_leaves(self) -> bool:
        """Whether the run without ds_adacc has its blocks as ZeRO-3 leaf modules, as the run with it.

        DeepSpeed's hooks inside a block change the order in which autograd adds up the gradients of a tensor that
        several modules read: a LLaMA's q, k and v.
        """
        return self.stage == 3 and self.model in ("llama", "lora")


CASES = (
    Case(0, model="tied blocks", micro_batches=2, further=True),
    Case(0, "bf16", "llama", further=True),
    Case(0, "fp16"),
    Case(0, "autocast", "lora", further=True),
    Case(1, model="lora", overlap=True, further=True),
    Case(1, "bf16", micro_batches=2, offload="optimizer"),
    Case(1, "fp16", "llama", micro_batches=2, further=True),
    Case(1, "autocast", "frozen", overlap=True, further=True),
    Case(2, model="llama", micro_batches=2, overlap=True, offload="optimizer"),
    Case(2, "bf16", "frozen", codecs="paper"),
    Case(2, "fp16", "tied blocks", overlap=True, further=True),
    Case(2, "autocast", micro_batches=2, further=True),
    Case(3, model="lora", micro_batches=2, offload="optimizer, parameters"),
    Case(3, model="frozen", overlap=True, persistent=True, further=True),
    Case(3, "bf16", "lora", overlap=True, offload="optimizer", further=True),
    Case(3, "bf16", "tied blocks", micro_batches=2, persistent=True, codecs="paper"),
    Case(3, "fp16", overlap=True, offload="optimizer, parameters"),
    Case(3, "autocast", "llama", micro_batches=2, overlap=True),
)


def ds_config(case: Case, section: dict | None) -> dict:
    """The DeepSpeed config of `case`, with the "adacc" section if there is one."""
    zero = {"stage": case.stage, "overlap_comm": case.overlap}
    if case.stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 100_000 if case.persistent else 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    zero |= {f"offload_{key}": {"device": "cpu"} for key in ("optimizer", "param") if key in case.offload}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }
    if case.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if case.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}
    if case.precision == "autocast":
        safe = ["torch.nn.Linear"]
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": safe}
    return config | ({"adacc": section} if section else {})


def trainer_config(stage: int, section: dict | None) -> dict:
    """The config of Hugging Face's Trainer, which puts its own arguments in the place of "auto"."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    return config | ({"adacc": section} if section else {})
