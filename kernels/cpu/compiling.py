"""How this backend's kernels are compiled: by Numba, at the first call, and kept on disk for later processes."""

from collections.abc import Callable
from typing import Any

import numba

# One rounding an operation: no fused multiply-add, nothing reordered.
COMMON = {"nogil": True, "fastmath": False, "error_model": "numpy"}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of integers that Python calls; it runs without the GIL.

    Numba looks only at the function's own file to see whether the code on disk is out of date. After an edit of a
    function that it calls from another file, delete `__pycache__`.
    """
    try:
        return numba.njit(cache=True, **COMMON)(function)
    except RuntimeError as error:
        raise RuntimeError(
            f"no folder to keep compiled kernels in ({error}); set NUMBA_CACHE_DIR to one that you may write to"
        ) from error


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only kernels call, into their own code."""
    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **COMMON)(function)
