"""DeepSpeed's buckets are not the blocks' memory, though it takes them while a block's backward runs."""

import pytest
from bucket_worker import HEADS, STAGES
from cases import parameters_that_run
from launch import on_ranks, told

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("buckets")
    on_ranks("bucket_worker", out, *map(name_of, parameters_that_run(request)), ranks=1, seconds=580)
    (results,) = told(out, ranks=1)
    return results


def name_of(case):
    return f"{case['stage']} {case['head']} {case['overlap']}"


@pytest.mark.matrix
@pytest.mark.parametrize("overlap", ["alone", "overlap"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_observed_is_the_blocks_own(results, stage, head, overlap):
    found = results[name_of({"stage": stage, "head": head, "overlap": overlap})]
    assert (found["shortfalls"], found["warnings"]) == ([], [])
    assert found["observed"] == pytest.approx(found["planned"], rel=0.05)
    assert found["observed"] <= found["budget"]
    assert found["losses"] == found["plain"]
