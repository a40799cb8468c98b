"""Throughput of every codec, dtype, backend and size, beside a copy of the same tensor in the same run.

    python benchmarks/throughput.py --out benchmarks/results                    on a GPU if there is one
    python benchmarks/throughput.py --device cpu --max-size 64 --out FOLDER

A codec that differs from the reference by a bit gets no time. GB/s: bytes of the uncompressed tensor a second, the
median over rounds; in a round, copy, clone, compression and decompression take turns. "of copy": beside `copy_` into
memory in use; the clone shows what fresh memory, which decompression returns too, costs more. "of ideal": the time
that the copy would take for the bytes that the codec must read and write, over the codec's own. On a GPU the times
are those of events on the stream, after the L2 cache has been overwritten. The last column is the host's time a call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from markdown_table import markdown_row, markdown_table
from origin import origin, publish

from ds_adacc.environment import device_name
from ds_adacc.kernels import CODECS, Codec, make_codec, separates_outliers

SIZES = (1, 4, 16, 64, 256, 512)  # MiB
CHANNELS, GROUP, OUTLIERS = 1024, 128, 8
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = {name: (*FLOATS, torch.bool) if name == "bits" else FLOATS for name in CODECS}
BACKENDS = {"cpu": ("reference", "cpu"), "cuda": ("reference", "cuda")}
SECONDS, ROUNDS = 0.4, (5, 50)  # a case's time, and the least and the most rounds
CALLS = 200
FLUSH = 256 << 20  # bytes, more than any L2 cache
AHEAD = 1_000_000  # cycles of a kernel that does nothing: about half a millisecond, many launches of the host
HEADER = ["codec", "dtype", "MiB", "backend", "copy GB/s", "clone GB/s", "compress GB/s", "of copy", "of ideal"]
HEADER += ["decompress GB/s", "of copy", "of ideal", "call µs, tiny"]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def build(name: str, backend: str, device: torch.device) -> Codec:
    """A codec; one that separates outliers keeps OUTLIERS of the channels."""
    channels = None
    if separates_outliers(name):
        channels = torch.arange(0, CHANNELS, CHANNELS // OUTLIERS, dtype=torch.int64, device=device)
    return make_codec(name, backend=backend, group_size=GROUP, channels=channels)


def sample(name: str, dtype: torch.dtype, mebibytes: int, device: torch.device) -> Tensor:
    """A tensor (rows, CHANNELS): noise of dropout for "bits", heavy-tailed numbers for the rest."""
    generator = torch.Generator(device).manual_seed(0)
    rows = (mebibytes << 20) // dtype.itemsize // CHANNELS
    x = torch.empty((rows, CHANNELS), dtype=dtype, device=device)
    for part in x.split(1 << 14):
        noise = torch.randn(part.shape, generator=generator, device=device)
        part.copy_((noise > 0.3) * (1.0 if dtype == torch.bool else 1.25) if name == "bits" else noise * noise.abs())
    return x


def differs(x: Tensor, codec: Codec, reference: Codec) -> str | None:
    """What the codec gets wrong, in words; None if nothing."""
    payload, expected = codec.compress(x), reference.compress(x)
    if not all(map(same_bits, payload, expected)):
        return "payload differs from the reference's"
    y, z = (c.decompress(expected, x.shape, x.dtype) for c in (codec, reference))
    return None if same_bits(y, z) else "result differs from the reference's"


def same_bits(x: Tensor, y: Tensor) -> bool:
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    x, y = (t.view(INTEGERS[t.element_size()]) for t in (x, y))
    return all(map(torch.equal, x.flatten().split(1 << 24), y.flatten().split(1 << 24)))


class HostClock:
    """Seconds of calls that return when they are done."""

    def seconds(self, call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started


class StreamClock:
    """Seconds on the stream, with the L2 cache cold and the host ahead: its launches are not part of them."""

    def __init__(self, device: torch.device) -> None:
        self.flushed = torch.empty(FLUSH, dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        started, stopped = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        self.flushed.zero_()
        started.record()
        call()
        stopped.record()
        stopped.synchronize()
        return started.elapsed_time(stopped) / 1e3


Clock = HostClock | StreamClock


def interleaved(calls: Mapping[str, Callable[[], object]], clock: Clock) -> dict[str, list[float]]:
    """Per name the seconds of each round; the calls take turns."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    started, (least, most) = time.perf_counter(), ROUNDS
    while len(seen["copy"]) < least or (time.perf_counter() - started < SECONDS and len(seen["copy"]) < most):
        for name, call in calls.items():
            seen[name].append(clock.seconds(call))
    return seen


def launch_overhead(codec: Codec, x: Tensor) -> list[float]:
    """Microseconds of the host for one call with a tiny tensor: (compress, decompress)."""
    x = x[:2].clone()
    payload = codec.compress(x)
    both = []
    for call in (lambda: codec.compress(x), lambda: codec.decompress(payload, x.shape, x.dtype)):
        call()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        both.append(1e6 * (time.perf_counter() - started) / CALLS)
        if x.is_cuda:
            torch.cuda.synchronize()
    return both


def measure(
    name: str, dtype: torch.dtype, backend: str, mebibytes: int, clock: Clock, device: torch.device
) -> dict[str, Any]:
    """One row of the table."""
    codec, reference = build(name, backend, device), build(name, "reference", device)
    x = sample(name, dtype, mebibytes, device)
    row = {"codec": name, "dtype": str(dtype).removeprefix("torch."), "backend": backend, "mebibytes": mebibytes}
    wrong = differs(x, codec, reference)
    if wrong:
        return {**row, "wrong": wrong}
    payload, target = codec.compress(x), torch.empty_like(x)
    calls = {
        "copy": lambda: target.copy_(x),
        "clone": lambda: x.clone(),
        "compress": lambda: codec.compress(x),
        "decompress": lambda: codec.decompress(payload, x.shape, dtype),
    }
    took = {call: statistics.median(seconds) for call, seconds in interleaved(calls, clock).items()}
    row |= {f"{call}_gbps": x.nbytes / seconds / 1e9 for call, seconds in took.items()}
    share = (x.nbytes + codec.payload_bytes(x.shape, dtype)) / (2 * x.nbytes)
    for call in ("compress", "decompress"):
        row[f"{call}_of_copy"] = took["copy"] / took[call]
        row[f"{call}_of_ideal"] = share * took["copy"] / took[call]
    row["compress_us"], row["decompress_us"] = launch_overhead(codec, x)
    return row


def measure_all(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    clock = StreamClock(device) if device.type == "cuda" else HostClock()
    rows = []
    for name in args.codecs:
        for dtype in DTYPES[name]:
            for mebibytes in (size for size in SIZES if args.min_size <= size <= args.max_size):
                for backend in BACKENDS[device.type]:
                    rows.append(measure(name, dtype, backend, mebibytes, clock, device))
                    print(markdown_row(cells(rows[-1])), flush=True)
    return rows


def cells(row: Mapping[str, Any]) -> list[object]:
    """A row of the table."""
    first = [row[key] for key in ("codec", "dtype", "mebibytes", "backend")]
    if "wrong" in row:
        return [*first, row["wrong"], *[""] * (len(HEADER) - len(first) - 1)]
    keys = ["copy_gbps", "clone_gbps"]
    keys += (f"{call}_{what}" for call in ("compress", "decompress") for what in ("gbps", "of_copy", "of_ideal"))
    return [*first, *(f"{row[key]:.2f}" for key in keys), f"{row['compress_us']:.0f}, {row['decompress_us']:.0f}"]


def plot(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Ratio to the copy over the size: a panel for each dtype and direction, a line for each codec and backend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, panels = pyplot.subplots(
        len(dtypes), 2, figsize=(11, 3.2 * len(dtypes)), squeeze=False, sharex=True, layout="constrained"
    )
    shown = {}
    for dtype, pair in zip(dtypes, panels, strict=True):
        for call, panel in zip(("compress", "decompress"), pair, strict=True):
            lines = {}
            for row in rows:
                if row["dtype"] == dtype and "wrong" not in row:
                    lines.setdefault((row["codec"], row["backend"]), []).append(row)
            for (codec, backend), points in lines.items():
                color = pyplot.get_cmap("tab20")(CODECS.index(codec))
                style = {"color": color, "linestyle": ":" if backend == "reference" else "-"}
                ratios = [point[f"{call}_of_copy"] for point in points]
                sizes = [point["mebibytes"] for point in points]
                (shown[f"{codec}, {backend}"],) = panel.plot(sizes, ratios, marker=".", **style)
            panel.set(title=f"{call}, {dtype}", xlabel="MiB", ylabel="throughput / copy's", xscale="log")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
    figure.legend(shown.values(), shown.keys(), fontsize=8, loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def write(rows: Sequence[Mapping[str, Any]], device: torch.device, folder: Path) -> None:
    about = origin(device_name(device))
    path = folder / f"codecs-{device.type}"
    publish(path, about, markdown_table(HEADER, map(cells, rows)), rows=rows)
    plot(rows, f"{about['device']}, {about['date']}", path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=BACKENDS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS)
    parser.add_argument("--min-size", type=int, default=SIZES[0], help="MiB")
    parser.add_argument("--max-size", type=int, default=SIZES[-1], help="MiB")
    parser.add_argument("--out", type=Path, help="a folder for the table, JSON and a plot")
    args = parser.parse_args()
    device = torch.device(args.device)
    print(markdown_table(HEADER, []))
    rows = measure_all(args, device)
    if args.out:
        write(rows, device, args.out)


if __name__ == "__main__":
    main()
