"""What the policies of all blocks cost together: the peak of a step, the bytes held, and the time added."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ds_adacc.planner.policy import Policy
from ds_adacc.planner.problem import Problem
from ds_adacc.planner.simulate import Simulation, simulate

Policies = Sequence[Sequence[Policy]]  # per block type, of each of its blocks in forward order
Simulations = dict[tuple[str, Policy], Simulation]  # by the block type's name


def simulations(problem: Problem, policies: Policies, known: Simulations | None = None) -> list[list[Simulation]]:
    """The simulation of one call of every block. ValueError if a policy does not fit, or a block has none.

    What blocks lend counts if any block replays something, whatever their own policies say: those that are given it
    do not count it again. `known`: the simulations of earlier calls with the same profiles. It grows.
    """
    known = {} if known is None else known
    results = []
    for block_type, chosen in zip(problem.block_types, _as_lent(problem, policies), strict=True):
        if len(chosen) != block_type.blocks:
            raise ValueError(
                f"block type {block_type.name!r} has {block_type.blocks} blocks; got {len(chosen)} policies"
            )
        for policy in chosen:
            if (block_type.name, policy) not in known:
                known[block_type.name, policy] = simulate(block_type.profile, policy)
        results.append([known[block_type.name, policy] for policy in chosen])
    return results


def _as_lent(problem: Problem, policies: Policies) -> Policies:
    """The policies, with what blocks lend (`Value.lent`) retained if any block of the problem replays something."""
    if not any(each.profile.graph.lends for each in problem.block_types):
        return policies
    pairs = list(zip(problem.block_types, policies, strict=True))
    replays = any(each.profile.graph.replayed(policy.stores) for each, chosen in pairs for policy in {*chosen})
    return [[policy.lending(each.profile, replays) for policy in chosen] for each, chosen in pairs]


def peak_bytes(problem: Problem, policies: Policies, known: Simulations | None = None) -> int:
    """The most bytes of activations in a step: the paper's M_act (equation 8), with the transient that it leaves out.

    In forward, what the calls hold adds up, and so does what caches hold besides; what one of them offloads is copied
    while the next one runs. Backward takes the calls one by one. In a known order, a call finds only what the calls
    before it in forward hold. In an unknown order, any call may be the first, and find what all hold. `known` and
    ValueError as in `simulations`.
    """
    runs = simulations(problem, policies, known)
    if problem.order:
        calls = _calls(problem, runs)
        # What the calls before hold, what caches do, and what the last of them still copies to the host.
        held = accumulate(call.held + call.cached for call in calls)
        before = [0, *(total + call.fetched for total, call in zip(held, calls, strict=True))]
        forward = max(there + max(call.forward, default=0) for there, call in zip(before, calls, strict=False))
        return max(forward, *(alive for _, alive in timeline_of(problem, runs)))
    return _unordered(problem, runs)


def added_seconds(problem: Problem, policies: Policies, known: Simulations | None = None) -> float:
    """Seconds that replays, codecs and transfers add to a step (paper, equation 4).

    `known` and ValueError as in `simulations`.
    """
    pairs = zip(problem.block_types, simulations(problem, policies, known), strict=True)
    return sum(block_type.calls_per_block * run.seconds for block_type, of_type in pairs for run in of_type)


def held_bytes(problem: Problem, policies: Policies) -> tuple[int, ...]:
    """Bytes that all calls of each block type hold between forward and backward."""
    return tuple(
        block_type.calls_per_block * sum(policy.held_bytes(block_type.profile) for policy in chosen)
        for block_type, chosen in zip(problem.block_types, policies, strict=True)
    )


def cached_bytes(problem: Problem, policies: Policies) -> int:
    """Bytes that caches hold beside that until the forward of the model has ended, once for all calls of a block."""
    pairs = zip(problem.block_types, policies, strict=True)
    return sum(policy.cached_bytes(block_type.profile) for block_type, chosen in pairs for policy in chosen)


def timeline_of(problem: Problem, runs: Sequence[Sequence[Simulation]]) -> list[tuple[int, int]]:
    """(number of the block in forward order, bytes alive) at each event of backward, after an entry for its start."""
    calls = _calls(problem, runs)
    before = sum(call.held for call in calls)
    line = [(len(calls) - 1, before + sum(call.fetched for call in calls[-2:]))]
    for number in reversed(range(len(calls))):
        before -= calls[number].held
        fetched = next((call.fetched for call in reversed(calls[:number]) if call.fetched), 0)
        carried = calls[number].carried if number == len(calls) - 1 else 0
        line += [(number, before + fetched + alive - carried) for alive in calls[number].timeline]
    return line


def _calls(problem: Problem, runs: Sequence[Sequence[Simulation]]) -> list[Simulation]:
    """One call of every block, in forward order."""
    waiting = [iter(of_type) for of_type in runs]
    return [next(waiting[place]) for place, blocks in problem.rows for _ in range(blocks)]


def _unordered(problem: Problem, runs: Sequence[Sequence[Simulation]]) -> int:
    pairs = zip(problem.block_types, runs, strict=True)
    held = sum(block_type.calls_per_block * run.held for block_type, of_type in pairs for run in of_type)
    every = [run for of_type in runs for run in of_type]
    # A cache holds one copy for all calls of a block.
    forward = sum(run.cached for run in every) + max(run.forward_transient for run in every)
    return held + max(forward, *(run.transient for run in every)) + max(run.fetched for run in every)
