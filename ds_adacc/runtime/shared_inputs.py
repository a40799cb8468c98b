"""What no rank may do alone while tensor-parallel ranks hold shares of block inputs."""

from __future__ import annotations

from ds_adacc.execute.block import Block
from ds_adacc.execute.input_placement import InputPlacement


def refuse_alone(block: Block, reason: str | None, inputs: InputPlacement) -> None:
    """Refuse to run a call without ds_adacc for a `reason` that may hold on this rank only; None: there is none.

    Raises RuntimeError if ranks share block inputs: the others would wait in backward for this rank's share.
    """
    if reason is not None and inputs.group is not None:
        raise RuntimeError(
            f"adacc: block {block.name} cannot run as planned in this call: {reason}. With partition_activations the "
            "other tensor-parallel ranks may wait for this rank's share of its input. So avoid that, or set "
            "partition_activations to false"
        )
