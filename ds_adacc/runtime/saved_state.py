"""What a checkpoint saves of a runtime and of its step controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_adacc import planner
from ds_adacc.observe.calibration import Observation
from ds_adacc.plan.agreement import AgreementState
from ds_adacc.plan.plan import Plan
from ds_adacc.profile.gradient_error import CodecErrors
from ds_adacc.runtime.step_schedule import StepSchedule


@dataclass(frozen=True)
class ControllerState:
    """The part of a `StepController` that a checkpoint saves. `corrected` is that of its `Calibration`."""

    agreement: AgreementState = field(default_factory=AgreementState)
    plan: Plan | None = None
    observation: Observation | None = None
    has_run_a_plan: bool = False
    corrected: int = 0
    schedule: StepSchedule = field(default_factory=StepSchedule)


@dataclass(frozen=True)
class RuntimeState:
    """The part of a `Runtime` that a checkpoint saves.

    `profiles` are the profiles of this rank, by block type, and `errors` the measured gradient errors of the codecs.
    """

    controller: ControllerState = field(default_factory=ControllerState)
    profiles: Mapping[str, planner.Profile] = field(default_factory=dict)
    errors: Mapping[str, CodecErrors] = field(default_factory=dict)
