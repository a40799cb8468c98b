"""Python's collector of garbage, kept from running while something is looked at."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from collecting garbage meanwhile.

    A collection may come at any allocation. It releases tensors, and it runs what has nothing to do with the code
    around it: `__del__`, callbacks of weak references, and those in `gc.callbacks`.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
