"""The "adacc" section of ds_config: the only room where its keys and defaults live.

In comes a ds_config: a path, a dict, or base64. Out go a checked `AdaccConfig` and, for `ds_adacc.checkpointing`, the
options of DeepSpeed's "activation_checkpointing" section. DeepSpeed ignores top-level keys that it does not know, and
with them misspelt ones. The section is therefore strict: every key, type and value is checked, and one ConfigError
names everything that is wrong, each with the nearest valid name.

* `reader`: reads ds_config as DeepSpeed does, and turns what is wrong into messages.
* `section`: the keys, types, defaults and checks of the section; `memory_budget`: what that key may be; `problems`: how
  checks tell of what is wrong.
* `presets`: the roles of values, and the codecs that each preset offers for them.
* `activation_checkpointing`: the keys of DeepSpeed's own section.
"""

from ds_adacc.config.memory_budget import MemoryBudget
from ds_adacc.config.presets import UNBOUNDED
from ds_adacc.config.problems import ConfigError
from ds_adacc.config.reader import ENVIRONMENT, load, misplaced, origin, read, section_of
from ds_adacc.config.section import (
    COMPACT_SCALE,
    LARGEST_BOUND,
    SECTION,
    AdaccConfig,
    CompactConfig,
    codecs_for,
)

__all__ = [
    "COMPACT_SCALE",
    "ENVIRONMENT",
    "LARGEST_BOUND",
    "SECTION",
    "UNBOUNDED",
    "AdaccConfig",
    "CompactConfig",
    "ConfigError",
    "MemoryBudget",
    "codecs_for",
    "load",
    "misplaced",
    "origin",
    "read",
    "section_of",
]
