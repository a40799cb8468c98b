"""The simulator, against timelines worked out by hand on the `block` of conftest."""

from ds_adacc.planner import Kind, Policy, Simulation, added_seconds, peak_bytes, simulate


def test_retain_frees_each_value_after_its_last_use(block):
    policy = Policy(("retain", "retain", "retain", "retain", None, None), (2,))
    # x 100, a 40, b 10, c 60: b and c go after event 1, a after 2; d 30 lives in event 0 only
    timeline = (210 + 30 + 5, 210, 140 + 20, 100 + 1)
    assert simulate(block, policy) == Simulation(210, 245, timeline, 0.5)


def test_compress_and_replay(block):
    policy = Policy(("retain", None, None, "int4", None, None), (0, 2))
    timeline = (
        100 + 15 + 60 + 30 + 5,  # d replayed from c: c's payload and copy both stay for event 1
        100 + 15 + 60 + 40 + 10,  # b replayed from x, and a with it, which event 2 uses
        100 + 40 + 20,
        100 + 1,
    )
    assert simulate(block, policy) == Simulation(115, 225 + 7, timeline, 0.5 + 1.0 + 3.0 + 4.0)


def test_a_chain_is_replayed_at_the_first_request(block):
    policy = Policy(("retain", None, None, None, None, None), (0, 1, 2))
    timeline = (100 + 40 + 10 + 60 + 30 + 5, 100 + 40 + 10 + 60, 100 + 40 + 20, 100 + 1)
    assert simulate(block, policy) == Simulation(100, 245, timeline, 3.5)


def test_what_nothing_uses_is_held_to_the_end(block):
    policy = Policy(("retain", "retain", "retain", "retain", None, "retain"), (2,))
    assert simulate(block, policy).timeline == (265, 230, 180, 121)


def test_an_op_nothing_asks_for_does_not_run(block):
    policy = Policy(("retain", "retain", "retain", "retain", None, None), (0, 1, 2))
    assert simulate(block, policy).seconds == 0.5


def test_an_unused_output_never_comes_alive(block):
    policy = Policy(("retain", None, "retain", "retain", None, None), (0, 2))
    # the replay at event 2 makes a only: b is stored, and gone by then
    assert simulate(block, policy).timeline == (170 + 30 + 5, 170, 100 + 40 + 20, 101)


def test_peak_and_seconds_of_several_kinds(block):
    kinds = [Kind("few", block, 2), Kind("many", block, 5)]
    policies = [
        Policy(("retain", "retain", "retain", "retain", None, None), (2,)),
        Policy(("retain", None, None, "int4", None, None), (0, 2)),
    ]
    assert peak_bytes(kinds, policies) == 2 * 210 + 5 * 115 + max(245 - 210, 232 - 115)
    assert added_seconds(kinds, policies) == 2 * 0.5 + 5 * 8.5
