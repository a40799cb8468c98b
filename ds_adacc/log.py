"""The package's logger: it speaks on the first rank even where the program has not configured logging."""

from __future__ import annotations

import logging
import os
import sys


def get_logger() -> logging.Logger:
    """The logger "ds_adacc"; INFO reaches stderr unless the program gave it handlers or a level of its own."""
    logger = logging.getLogger("ds_adacc")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[ds_adacc] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    return logger
