"""A rank that is killed ends the run, and the next run goes on from the checkpoint as if nothing had happened."""

import pytest
from killed_worker import SAVED, STEPS
from launch import HERE, by_launcher, on_ranks, told
from processes import free_port

SECONDS = 120  # DeepSpeed's launcher looks at its ranks every second; the rest is imports

pytestmark = [pytest.mark.ranks, pytest.mark.further]


def launch(*arguments):
    """Start the worker on two ranks with the `deepspeed` command; returns its exit code and output."""
    options = ["--num_gpus", "2", "--master_port"]
    with free_port() as port:
        command = ["deepspeed.launcher.runner", *options, port, HERE / "killed_worker.py", *arguments]
        return by_launcher(*command, seconds=SECONDS)


def test_a_killed_rank_ends_the_run_and_the_next_one_goes_on(tmp_path):
    code, output = launch("killed", tmp_path)
    assert code != 0
    assert (tmp_path / "latest").read_text() == f"global_step{SAVED}", output[-3000:]
    assert "return code = -9" in output
    on_ranks(HERE / "killed_worker.py", "resumed", tmp_path)
    for seen in told(tmp_path):
        assert len(seen["whole"]) == STEPS
        assert seen["resumed"] == seen["whole"][SAVED:]
        assert seen["replays"]
