"""DeepSpeed's buckets are not the blocks' memory, though it takes them while a block's backward runs."""

import json

import pytest
from bucket_worker import CASES
from launch import on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("buckets") / "results.json"
    on_ranks("bucket_worker.py", out, ranks=1, seconds=580)
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", CASES)
def test_what_is_observed_is_the_blocks_own(results, case):
    found = results[case]
    assert (found["shortfalls"], found["warnings"]) == ([], [])
    assert found["observed"] == pytest.approx(found["planned"], rel=0.05)
    assert found["observed"] <= found["budget"]
    assert found["losses"] == found["plain"]
