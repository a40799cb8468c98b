"""Ranks with unlike sections get an error that names what differs: they would plan at unlike steps, and hang."""

import pytest
from launch import told_by

pytestmark = pytest.mark.ranks
ADVICE = ". Both ranks need the same section. If ADACC_CONFIG gives it, set that on every machine"
BUDGET = "adacc.memory_budget = 0.5 on rank 0, and 0.4 on rank 1" + ADVICE
MISSING = "adacc: rank 0 has this section; rank 1 has none, or one that is disabled" + ADVICE


ranks = told_by("sections_worker", seconds=120)


def test_unlike_sections_are_an_error_on_every_rank(ranks):
    for rank in ranks:
        assert rank["equal"] == rank["attach equal"] == "2 blocks on 2 ranks"
        assert rank["other budget"] == rank["attach other budget"] == BUDGET
        assert rank["none"] == rank["disabled"] == rank["attach disabled"] == MISSING
        assert rank["other rectifier"].startswith("adacc.rectifier = enabled=True max_interval=1024 ")
        assert rank["other rectifier"].endswith(ADVICE)


def test_no_rank_waits_for_those_without_the_engine_and_stages_may_differ(ranks):
    assert [(rank["alone"], rank["stages"]) for rank in ranks] == [(True, 1)] * 2
