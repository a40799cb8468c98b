"""The package's logger. It prints on the first rank even if the program has not configured logging."""

from __future__ import annotations

import logging
import math
import os
import sys

_FIRST = 3  # of events that are alike, the first are logged one by one


def is_logged(count: int) -> bool:
    """Whether to log an event that comes for the `count`-th time: the first three, the 10th, the 100th ..."""
    return count <= _FIRST or math.log10(count).is_integer()


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
