"""What backward replays under a plan, so that a test can tell a plan that recomputes from one that does not."""


def replayed(plan):
    """The operators that backward replays, of each policy of the plan."""
    return [
        block_type.profile.graph.replayed(policy.stores)
        for block_type in plan.block_types
        for policy in plan.policies[block_type.name]
    ]
