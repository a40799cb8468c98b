"""The options of DeepSpeed's "activation_checkpointing" section and of its `configure`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ds_adacc.config.problems import ConfigError, nearest

SECTION = "activation_checkpointing"
_NUMBER = "number_checkpoints"  # all other keys are switches, which may be given as null or 1
_KEYS = {  # by the argument of `configure`, where that has another name
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
}
_CONFIGURE = "call ds_adacc.checkpointing.configure(mpu, ds_config)"
ADVICE = {  # what to do in place of a key that an engine does not read
    "partition_activations": f"{_CONFIGURE}, and block inputs are shared among tensor-parallel ranks",
    "cpu_checkpointing": 'have "offload": true (the default) in the "adacc" section, and tensors of a CUDA device wait '
    f"in host memory where that pays; or {_CONFIGURE}, and all retained block inputs wait there",
    "profile": "see the seconds in `ds_adacc report`",
}


@dataclass(frozen=True)
class Options:
    """The section's keys, with DeepSpeed's defaults and meanings."""

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Options:
        """The options of a ds_config that was read. DeepSpeed ignores unknown keys, so they are no error here.

        Raises ConfigError if the section is not an object.
        """
        section = _section_of(document)
        given = {field.name: section[field.name] for field in fields(cls) if field.name in section}
        return cls(**{name: value if name == _NUMBER else bool(value) for name, value in given.items()})

    def overridden(self, **given: object) -> Options:
        """These options, with whatever in `given`, arguments of `configure`, is not None in place of the section's.

        Raises AssertionError, as DeepSpeed does, if `contiguous_memory_optimization` is set without
        `partition_activations` or without `number_checkpoints`.
        """
        options = replace(self, **{_KEYS.get(name, name): value for name, value in given.items() if value is not None})
        if options.contiguous_memory_optimization and not options.partition_activations:
            raise AssertionError("contiguous checkpointing is only available with partitioned activations")
        if options.contiguous_memory_optimization and options.number_checkpoints is None:
            raise AssertionError("contiguous checkpointing needs the number of layers (number_checkpoints)")
        return options

    def beyond(self, in_force: Options) -> tuple[str, ...]:
        """The keys that ask for something, which is neither DeepSpeed's default nor in force."""
        names, default = [field.name for field in fields(self)], Options()
        return tuple(n for n in names if getattr(self, n) not in (getattr(default, n), getattr(in_force, n)))

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The keys that are set but have no effect in ds_adacc."""
        idle = ("contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile")
        return tuple(name for name in idle if getattr(self, name))


def unknown_keys(document: Mapping[str, Any]) -> list[str]:
    """One line for each key of the section that DeepSpeed does not know either. Raises ConfigError as `Options.of`."""
    known = [field.name for field in fields(Options)]
    return [
        f"{SECTION}.{key} = {value!r}: unknown key, which has no effect{nearest(key, known)}"
        for key, value in _section_of(document).items()
        if key not in known
    ]


def _section_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    section = document.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"{SECTION} = {section!r}: must be an object")
    return section
