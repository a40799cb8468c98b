"""benchmarks/throughput.py gives a time to right codecs only."""

import json

import pytest
import throughput
import torch

from ds_adacc.kernels import CODECS


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    for name, value in (("SECONDS", 0.01), ("ROUNDS", (2, 3)), ("CALLS", 3)):
        monkeypatch.setattr(throughput, name, value)


class Wrong:
    """A codec with one bit of one byte flipped, in the payload or in the result."""

    def __init__(self, codec, where):
        self.codec, self.where = codec, where

    def compress(self, x):
        codes, *rest = self.codec.compress(x)
        codes.view(-1)[-1] ^= self.where == "payload"
        return codes, *rest

    def decompress(self, payload, shape, dtype):
        y = self.codec.decompress(payload, shape, dtype)
        y.view(torch.uint8).view(-1)[7] ^= self.where == "result"
        return y


@pytest.mark.parametrize("name", CODECS)
def test_one_bit_is_enough_to_be_wrong(name):
    device = torch.device("cpu")
    x = throughput.sample(name, torch.float32, 1, device)
    codec = throughput.build(name, "reference", device)
    assert x.nbytes == 1 << 20
    assert throughput.differs(x, codec, codec) is None
    for where in ("payload", "result"):
        assert throughput.differs(x, Wrong(codec, where), codec) == f"{where} differs from the reference's"


def test_rows_are_ratios_to_the_copy_and_are_written(tmp_path):
    device, clock = torch.device("cpu"), throughput.HostClock()
    right = throughput.measure("group", torch.bfloat16, "cpu", 1, clock, device)
    for call in ("compress", "decompress"):
        assert right[f"{call}_of_copy"] == pytest.approx(right[f"{call}_gbps"] / right["copy_gbps"])
        # 2 bytes read, half a byte of code and 4 bytes a group of 128 written; a copy reads 2 and writes 2.
        share = right[f"{call}_of_ideal"] / right[f"{call}_of_copy"]
        assert share == pytest.approx((2 + 0.5 + 4 / 128) / 4)
    wrong = {"codec": "token", "dtype": "float32", "backend": "cpu", "mebibytes": 1, "wrong": "payload differs"}
    throughput.write([right, wrong], device, tmp_path)
    assert json.loads((tmp_path / "codecs-cpu.json").read_text())["rows"] == [right, wrong]
    table, sources = (tmp_path / "codecs-cpu.md").read_text().split("\n\n")
    assert [line.count("|") for line in table.splitlines()] == [14] * 4
    assert "- device: " in sources
    assert (tmp_path / "codecs-cpu.png").read_bytes().startswith(b"\x89PNG")
