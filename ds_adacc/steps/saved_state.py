"""What a checkpoint saves of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import ConfigDict

from ds_adacc import planner
from ds_adacc.observe.calibration import Observation
from ds_adacc.plan.agreement import AgreementState
from ds_adacc.plan.plan import Plan
from ds_adacc.profile.gradient_error import CodecErrors
from ds_adacc.steps.step_schedule import StepSchedule


@dataclass(frozen=True)
class State:
    """The state of one rank after a whole number of optimizer steps. `State()` is that of a new run.

    `corrected` is that of `Calibration`. `profiles` are the profiles of this rank, by block type, and `errors` the
    measured gradient errors of the codecs. `blocks`: all blocks, with their variants and their indices in forward
    order, as plain containers of tensors. `seeds` is the state of the random number generator of stochastic rounding
    (uint8); None leaves that generator unchanged.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)  # tensors

    agreement: AgreementState = field(default_factory=AgreementState)
    plan: Plan | None = None
    observation: Observation | None = None
    has_run_a_plan: bool = False
    corrected: int = 0
    schedule: StepSchedule = field(default_factory=StepSchedule)
    profiles: Mapping[str, planner.Profile] = field(default_factory=dict)
    errors: Mapping[str, CodecErrors] = field(default_factory=dict)
    blocks: Sequence[Mapping[str, Any]] = ()
    seeds: torch.Tensor | None = None
