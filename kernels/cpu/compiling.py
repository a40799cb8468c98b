"""How this backend's kernels are compiled: by Numba, at the first call, and kept on disk for the processes to come."""

from collections.abc import Callable
from typing import Any

import numba

# One rounding an operation: no fused multiply-add, nothing reordered.
COMMON = {"nogil": True, "fastmath": False, "error_model": "numpy"}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of integers, to be called from Python; it runs without the GIL.

    Numba tells by a function's own file whether what is on disk is stale: after an edit of what it calls in another
    file, delete `__pycache__`.
    """
    try:
        return numba.njit(cache=True, **COMMON)(function)
    except RuntimeError as error:
        raise RuntimeError(f"set NUMBA_CACHE_DIR to a writable folder, for compiled kernels: {error}") from error


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only kernels call, as a part of theirs."""
    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **COMMON)(function)
