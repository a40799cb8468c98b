"""Of the passes of one live set, those are kept of which no other had as many calls of every block type alive."""

from ds_adacc.plan.passes import Passes


def test_a_pass_with_fewer_calls_of_every_type_tells_nothing():
    passes = Passes()
    for alive in ({"a": 4, "b": 4}, {"a": 2, "b": 4}, {"a": 4, "b": 4}):
        passes.note(alive)
    assert passes.of(frozenset("ab")) == ({"a": 4, "b": 4},)


def test_passes_of_which_neither_has_as_many_of_every_type_are_both_kept():
    passes = Passes()
    for alive in ({"a": 4, "b": 1}, {"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 5, "b": 1}):
        passes.note(alive)
    assert passes.of(frozenset("ab")) == ({"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 5, "b": 1})


def test_each_live_set_has_its_own():
    passes = Passes()
    for alive in ({"a": 4}, {"a": 2, "b": 2}, {"b": 3, "c": 1}):
        passes.note(alive)
    assert passes.of(frozenset("a")) == ({"a": 4},) and passes.of(frozenset("c")) == ()
    assert passes.within("ab") == [{"a": 4}, {"a": 2, "b": 2}]
    passes.forget_all_but("ac")
    assert passes.within("abc") == [{"a": 4}]
