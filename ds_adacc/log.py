"""The package's logger. It prints on the first rank even if the program has not configured logging."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any

_FIRST = 3  # of events that are alike, the first are logged one by one; of many names, the first are told


def is_logged(count: int) -> bool:
    """Whether to log an event that comes for the `count`-th time: the first three, the 10th, the 100th ..."""
    return count <= _FIRST or math.log10(count).is_integer()


def named(names: Sequence[str]) -> str:
    """All of these names or, of five and more, the first three and how many more there are."""
    if len(names) <= _FIRST + 1:  # "and 1 more" is no shorter
        return ", ".join(names)
    return f"{', '.join(names[:_FIRST])} and {len(names) - _FIRST} more"


def get_logger() -> logging.Logger:
    """The logger "ds_adacc".

    Handlers and a level that the program has set stay. Otherwise messages go to stderr: from INFO on in rank 0, and
    only errors in all other ranks.
    """
    logger = logging.getLogger("ds_adacc")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[ds_adacc] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    return logger


class EngineLog(logging.LoggerAdapter):
    """The logger for lines about one engine. `engine` is what users may call it, such as "engine 2 (Discriminator)".

    The lines begin with that where `names_engine` is true: there are several, whose blocks may have the same names.
    """

    def __init__(self) -> None:
        super().__init__(get_logger())
        self.engine = ""
        self.names_engine = False
        self._told: set[Hashable] = set()

    def once(self, key: Hashable, level: int, text: str, *args: object) -> None:
        """Log this, unless something with this key was logged before."""
        if key not in self._told:
            self._told.add(key)
            self.log(level, text, *args)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message as it is logged, and `kwargs` as they are."""
        return f"{self.engine}: {msg}" if self.names_engine else msg, kwargs
