"""Two ranks under ZeRO 0-3: the losses with a lossless policy are those without ds_adacc, bit for bit."""

import math

import pytest
from cases import cases_that_run, further
from launch import on_ranks, told
from zero_cases import CASES
from zero_worker import OVERFLOW, STEPS

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def parameters(cases):
    return [(further if case.further else pytest.param)(case, id=case.name) for case in cases]


by_name = pytest.mark.parametrize("case", parameters(CASES))


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("zero")
    on_ranks("zero_worker", out, *(case.name for case in cases_that_run(request, "case")), seconds=580)
    return told(out)


def stores(plan):
    return {store for policy in plan["policies"] for store in policy["stores"] if store}


@by_name
def test_losses_are_bit_identical_unless_a_codec_is_lossy(ranks, case):
    for rank in ranks:
        plain, adacc = rank[case.name]["plain"]["losses"], rank[case.name]["adacc"]["losses"]
        assert len(plain) == STEPS * case.micro_batches
        if case.codecs == "none":
            assert adacc == plain
        else:
            assert adacc[0] == plain[0]
            assert all(math.isfinite(loss) for loss in adacc)
            assert adacc == pytest.approx(plain, rel=0.02)


@by_name
def test_all_ranks_run_the_same_policies_and_hold_what_they_say(ranks, case):
    first, second = (rank[case.name]["adacc"]["plan"] for rank in ranks)
    assert first["policies"] == second["policies"]
    assert any(first["replays"])
    if case.codecs == "none":
        assert stores(first) <= {"retain", "bits"}
    assert first["counts"] == second["counts"]
    assert sum(first["counts"]) == 3
    assert first["observed"] == second["observed"] == first["planned"] > 0
    assert first["tracked_to"] > 1 or case.codecs == "paper"  # which may have its model corrected first


@pytest.mark.parametrize("case", parameters(case for case in CASES if case.precision == "fp16"))
def test_an_overflow_under_a_plan_skips_the_step_and_halves_the_scale(ranks, case):
    for rank in ranks:
        plain, adacc = rank[case.name]["plain"], rank[case.name]["adacc"]
        last = case.micro_batches * OVERFLOW - 1
        assert adacc["scales"][last] == adacc["scales"][last - 1] / 2
        assert (adacc["skipped"], adacc["scales"]) == (plain["skipped"], plain["scales"])
        assert adacc["skipped"] == 1


@pytest.mark.parametrize("case", parameters(case for case in CASES if case.stage == 3))
def test_no_gathered_parameter_outlives_its_block(ranks, case):
    for rank in ranks:
        seen = rank[case.name]["adacc"]
        assert (seen["gathered_bytes"] > 0) == (not case.persistent)
        assert seen["alive_after_forward"] == 0
        assert seen["alive_after_backward"] == 0
