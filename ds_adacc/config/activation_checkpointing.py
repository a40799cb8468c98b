"""What DeepSpeed's "activation_checkpointing" section, or its `configure`, asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ds_adacc.config import ConfigError, read

SECTION = "activation_checkpointing"


@dataclass(frozen=True)
class Options:
    """The section's keys, with DeepSpeed's defaults."""

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    @classmethod
    def of(cls, ds_config: str | os.PathLike[str] | Mapping[str, Any] | None) -> Options:
        """Those of `ds_config` (a path or a dict); DeepSpeed passes over keys it does not know, and so does this.

        Raises ConfigError if it cannot be read, or its section is not an object.
        """
        section = read(ds_config).get(SECTION, {})
        if not isinstance(section, Mapping):
            raise ConfigError(f"{SECTION} = {section!r}: must be an object")
        return cls(**{field.name: section[field.name] for field in fields(cls) if field.name in section})

    def overridden(self, **given: object) -> Options:
        """With all that is not None in place of the section's.

        Raises AssertionError, as DeepSpeed does, for contiguous buffers that are not of partitions, or not of a known
        number of layers.
        """
        options = replace(self, **{name: value for name, value in given.items() if value is not None})
        if options.contiguous_memory_optimization and not options.partition_activations:
            raise AssertionError("contiguous checkpointing is only available with partitioned activations")
        if options.contiguous_memory_optimization and options.number_checkpoints is None:
            raise AssertionError("contiguous checkpointing needs the number of layers (number_checkpoints)")
        return options

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The keys that are set and mean nothing here."""
        idle = ("contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile")
        return tuple(name for name in idle if getattr(self, name))
