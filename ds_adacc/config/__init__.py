"""The "adacc" section of ds_config: the only room where its keys and defaults live.

In comes a ds_config (a path, a dict, or base64); out go a checked `AdaccConfig` and, for `ds_adacc.checkpointing`, the
options of DeepSpeed's "activation_checkpointing" section. DeepSpeed ignores top-level keys that it does not know, and
so it ignores misspelt ones too. This section is therefore strict: every key, type and value is checked, and one
ConfigError reports all that is wrong, each with the nearest valid name.
"""

from ds_adacc.config.reader import load, read
from ds_adacc.config.section import (
    SECTION,
    AdaccConfig,
    ConfigError,
    MemoryBudget,
    RectifierConfig,
    SolverConfig,
    codecs_for,
)

__all__ = [
    "SECTION",
    "AdaccConfig",
    "ConfigError",
    "MemoryBudget",
    "RectifierConfig",
    "SolverConfig",
    "codecs_for",
    "load",
    "read",
]
