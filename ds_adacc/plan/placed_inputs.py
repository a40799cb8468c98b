"""Count the bytes of block inputs that are held as shares or in host memory."""

from __future__ import annotations

from dataclasses import replace

from ds_adacc import planner
from ds_adacc.execute.input_placement import InputPlacement
from ds_adacc.plan.correction import Correction
from ds_adacc.program.recording import Recording


def with_placed_inputs(profile: planner.Profile, recording: Recording, placement: InputPlacement) -> planner.Profile:
    """The profile in which a retained block input counts with the bytes that `placement` holds of it.

    In forward the whole input still counts, because it is an argument. It also counts during the whole backward of the
    call, because backward restores it at some point.
    """
    values, forward, backward = list(profile.graph.values), 0, 0
    for value in recording.values:
        if placement.store(value) != planner.RETAIN:
            held = placement.held_bytes(value)
            values[value.index] = replace(values[value.index], nbytes=held)
            forward += value.nbytes - held
            backward += value.nbytes
    if not backward:
        return profile
    counted = replace(profile, graph=replace(profile.graph, values=tuple(values)))
    return Correction(forward, backward).applied_to(counted)
