"""Scripts run as processes."""

import json
import socket
import sys
from pathlib import Path

import processes
import pytest


def test_a_failure_tells_what_was_logged_last(tmp_path):
    log = tmp_path / "run.log"
    with pytest.raises(RuntimeError, match=r"run\.log\n\nthe reason$"):
        processes.run([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], {}, log)


def test_a_script_alone_is_the_only_rank_and_has_one_thread(tmp_path):
    script, result = tmp_path / "script.py", tmp_path / "result.json"
    names = ["RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "OURS"]
    script.write_text(f"import json, os; json.dump([os.environ[n] for n in {names}], open({str(result)!r}, 'w'))")
    assert processes.alone(str(script), [], {"OURS": "1"}, result) == ["0", "1", "1", "1"]
    assert json.loads(result.read_text())


def test_a_port_is_given_to_no_outgoing_connection():
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.socket() as listener, processes.free_port() as port:
        assert int(port) < lowest
        listener.bind(("127.0.0.1", int(port)))


def test_a_port_that_is_taken_is_not_given(monkeypatch):
    with socket.socket() as listener, processes.free_port() as free:
        listener.bind(("127.0.0.1", 0))
        drawn = iter([listener.getsockname()[1], int(free)])
        monkeypatch.setattr(processes, "_any_port", lambda: next(drawn))
        with processes.free_port() as port:
            assert port == free
