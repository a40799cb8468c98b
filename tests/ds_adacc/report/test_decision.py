"""What a policy makes of each value, in words."""

from ds_adacc import planner
from ds_adacc.report.decision import choices, named_choices

VALUES = (
    planner.Value("x", "block_input", 0, None, True),
    planner.Value("a", "linear", 8, 0, True),
    planner.Value("b", "gelu", 8, 1, True),
    planner.Value("c", "other", 8, 2, False),
)
OPS = tuple(planner.Op(f"op{n}", (n,), (n + 1,), True) for n in range(3))
GRAPH = planner.BlockGraph(VALUES, OPS, (planner.Event("e", (1, 2), 0),))
PROFILE = planner.Profile(GRAPH, (1.0,) * 3, ((), (planner.CodecCost("int4", 2, 0, 0, 0.1, 0),), (), ()))


def test_each_choice_has_its_name_and_what_is_not_needed_none():
    policy = planner.Policy(("retain", "int4", None, None))
    assert choices(PROFILE, policy) == ["retain", "int4", "recompute", None]


def test_values_without_bytes_of_their_own_are_not_named():
    policy = planner.Policy(("retain", "int4", None, None))
    assert named_choices(PROFILE, policy, "xabc") == {"a": "int4", "b": "recompute"}
