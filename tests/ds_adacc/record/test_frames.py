"""Which calls are the block's that is being recorded."""

from recorded import call_of

from ds_adacc.record.frames import frames_of_block, run_recorded


def names():
    return [frame.f_code.co_name for frame in frames_of_block()]


def test_the_calls_within_the_block_are_its_own():
    def block():
        return names()

    assert run_recorded(call_of(block)) == ["names", "block"]


def test_before_and_after_the_block_there_are_none():
    """What its caller's arguments are called, or which modules run around it, is nothing about the block."""
    assert names() == []
    assert run_recorded(call_of(lambda: None)) is None
    assert names() == []
