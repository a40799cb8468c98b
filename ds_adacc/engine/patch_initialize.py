"""Replace `deepspeed.initialize`, for scripts and libraries that call it themselves."""

from __future__ import annotations

import functools
from typing import Any

import deepspeed

from ds_adacc.engine.api import initialize
from ds_adacc.log import get_logger


def patch_deepspeed() -> None:
    """Replace `deepspeed.initialize` in this process by `ds_adacc.initialize`.

    The replacement logs a warning if the config does not enable ds_adacc.
    """

    @functools.wraps(initialize)
    def replacement(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        result = initialize(*args, **kwargs)
        if not hasattr(result[0], "adacc"):
            text = 'adacc is off: the engine\'s config has no "adacc" section, or says "enabled": false in it'
            get_logger().warning(text)
        return result

    deepspeed.initialize = replacement
