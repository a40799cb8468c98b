"""What a watch of Python's calls tells of, and whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ds_adacc.python_state.places import Place


class Listener(Protocol):
    """Is told of what Python does while a block is recorded. The recorder is one."""

    def note_read(self) -> None:
        """Python is about to read a tensor's data."""

    def note_write(self, tensor: torch.Tensor) -> None:
        """Python is about to write to a tensor, one element after the other."""

    def note_address(self, tensor: torch.Tensor | None) -> None:
        """Python is about to give the address of a tensor (None: of any) to code that the dispatcher does not see."""

    def note_collective(self) -> None:
        """Python calls a collective, perhaps inside an operator of the user's."""

    def note_hook(self) -> None:
        """Python registers a hook for the gradient of a tensor."""

    def note_places(self, places: Mapping[str, Place]) -> None:
        """A function begins, perhaps inside an operator of the user's, which reads these places."""

    def function_begins(self, cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> bool:
        """`cls.apply` is called with `args`, and its forward is about to run.

        False: the listener does not want to know when it ends, but of those inside.
        """

    def function_ends(self, result: Any, context: Any, raised: bool) -> None:
        """`apply` has returned, or raised. `result`: what forward has returned; `context`: its `ctx`."""

    def function_is_hidden(self, cls: type[torch.autograd.Function]) -> None:
        """`cls.apply` is called, but nothing tells with what, nor when it ends."""
