"""Train the same GPT without checkpointing, with DeepSpeed's, with quantization and with Adacc: time, memory, loss.

python examples/compare.py [--steps N] [--rounds N] [options of train.py]

Writes the table, both plots, every run's log and metrics to runs/compare/, in place of what was there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from matplotlib.figure import Figure
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "compare"

# The files of ds_configs/; the first is what the others are compared with.
STRATEGIES = {
    "none": "no checkpointing",
    "full_checkpointing": "full checkpointing",
    "quantization": "quantization",
    "adacc": "Adacc",
    "adacc_no_outliers": "Adacc, no outlier separation",
}

TIMED_STEPS = 12

# glibc keeps freed blocks of up to 32 MiB for reuse, and the holes that they leave count as resident: full
# checkpointing then seems to take three times what it does. With these settings freed memory goes back to the system
# at once. The price is page faults, a third of a step's time; hence memory and time come from different runs.
EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Row:
    """What one strategy cost."""

    strategy: str
    step_seconds: float
    time_ratio: float
    peak_bytes: int
    memory_ratio: float
    bytes_held: int | None
    validation_loss: float


def train(strategy: str, run: str, steps: int, options: list[str], env: dict[str, str]) -> list[dict]:
    """Run train.py, showing its progress; returns its metrics."""
    metrics, log = OUT / f"{strategy}.{run}.jsonl", OUT / f"{strategy}.{run}.log"
    metrics.unlink(missing_ok=True)
    options = ["--steps", str(steps), "--metrics", str(metrics), *options]
    with log.open("w") as output, launched(strategy, options, env, output) as process:
        follow(process, metrics, tqdm(total=steps, desc=f"{STRATEGIES[strategy]}, {run}", leave=False))
    if process.returncode != 0:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        sys.exit(f"{tail}\n\n{shlex.join(process.args)} failed; all of its output is in {log}")
    return read(metrics)


@contextmanager
def launched(
    strategy: str, options: list[str], env: dict[str, str], output: IO[str] | None = None
) -> Iterator[subprocess.Popen]:
    """train.py under DeepSpeed's launcher, on a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    binaries = Path(sys.executable).parent
    command = [f"{binaries}/deepspeed", "--num_gpus", "1", "--master_port", str(port), "examples/train.py"]
    command += ["--deepspeed", "--deepspeed_config", f"ds_configs/{strategy}.json", *options]
    # DeepSpeed looks for ninja on the PATH; it is installed beside Python.
    env = os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"} | env
    try:
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT) as process:
            yield process
    finally:
        # On the CPU, DeepSpeed leaves 66 MiB of shared memory behind for each port.
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            buffer.unlink()


def follow(process: subprocess.Popen, metrics: Path, bar: tqdm) -> None:
    """Move the bar as the metrics grow, until the process ends."""
    with bar:
        while process.poll() is None:
            time.sleep(0.2)
            losses = [line["loss"] for line in read(metrics) if "loss" in line]
            if len(losses) > bar.n:
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
                bar.update(len(losses) - bar.n)


def read(metrics: Path) -> list[dict]:
    """The complete lines of a metrics file that may still be growing."""
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def time_steps(rounds: int, options: list[str]) -> dict[str, list[float]]:
    """Each strategy's median step seconds in every round: a machine's speed drifts, so they take turns."""
    seconds: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for number in range(1, rounds + 1):
        for strategy in STRATEGIES:
            metrics = train(strategy, f"time {number}", TIMED_STEPS, options, env={})
            seconds[strategy].append(metrics[-1]["median_step_seconds"])
    return seconds


def tabulate(seconds: dict[str, list[float]], curves: dict[str, list[dict]]) -> list[Row]:
    """One row a strategy; time is compared within a round."""
    base = next(iter(STRATEGIES))
    rows = []
    for strategy, label in STRATEGIES.items():
        end = curves[strategy][-1]
        ratios = [mine / reference for mine, reference in zip(seconds[strategy], seconds[base], strict=True)]
        rows.append(
            Row(
                strategy=label,
                step_seconds=statistics.median(seconds[strategy]),
                time_ratio=statistics.median(ratios),
                peak_bytes=end["peak_activation_bytes"],
                memory_ratio=end["peak_activation_bytes"] / curves[base][-1]["peak_activation_bytes"],
                bytes_held=end["bytes_held"],
                validation_loss=end["validation_loss"],
            )
        )
    return rows


def markdown(rows: list[Row]) -> str:
    """The table as people read it."""
    lines = [
        "| strategy | step time | of none | peak activation memory | of none | held | validation loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row.strategy,
            f"{row.step_seconds:.3f} s",
            f"{row.time_ratio:.2f}",
            mebibytes(row.peak_bytes),
            f"{row.memory_ratio:.2f}",
            mebibytes(row.bytes_held),
            f"{row.validation_loss:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f} MiB"


def plot_losses(curves: dict[str, list[dict]]) -> None:
    """The loss curves, and below them what sets each apart from the first."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    losses = {name: [line["loss"] for line in metrics if "loss" in line] for name, metrics in curves.items()}
    reference = losses[next(iter(STRATEGIES))]
    for strategy, mine in losses.items():
        label = f"{STRATEGIES[strategy]} (validation {curves[strategy][-1]['validation_loss']:.3f})"
        steps = range(1, len(mine) + 1)
        above.plot(steps, mine, label=label, linewidth=1)
        below.plot(steps, [loss - base for loss, base in zip(mine, reference, strict=True)], linewidth=1)
    above.set(ylabel="training loss")
    above.legend(frameon=False)
    below.set(xlabel="step", ylabel="difference")
    figure.savefig(OUT / "loss.png", dpi=150)


def plot_costs(rows: list[Row]) -> None:
    """Time against memory: the nearer to the lower left corner, the better."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        axes.scatter(row.memory_ratio, row.time_ratio)
        axes.annotate(row.strategy, (row.memory_ratio, row.time_ratio), xytext=(6, 4), textcoords="offset points")
    axes.set(xlabel="peak activation memory / no checkpointing", ylabel="step time / no checkpointing")
    axes.set_xlim(0, 1.4)
    axes.margins(y=0.25)
    figure.savefig(OUT / "time_memory.png", dpi=150)


def save(rows: list[Row], end: dict) -> None:
    """The table for people and for programs, with where it comes from."""
    origin = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "device": end["device"],
        "versions": ", ".join(f"{name} {version}" for name, version in end["versions"].items()),
    }
    table = markdown(rows)
    about = "\n".join(f"- {key}: {value}" for key, value in origin.items())
    (OUT / "table.md").write_text(f"{table}\n\n{about}\n")
    (OUT / "table.json").write_text(json.dumps(origin | {"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    print(f"\n{table}\n\nTable, plots and logs: {OUT}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of the run for loss and memory (default: 20)")
    parser.add_argument("--rounds", type=int, default=1, help="turns taken at timing (default: 1)")
    args, options = parser.parse_known_args()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    # The first DeepSpeed run on a machine builds an operator, for most of a minute.
    train(next(iter(STRATEGIES)), "set-up", 3, options, env={})
    seconds = time_steps(args.rounds, options)
    curves = {strategy: train(strategy, "loss", args.steps, options, EXACT_MALLOC) for strategy in STRATEGIES}
    rows = tabulate(seconds, curves)
    plot_losses(curves)
    plot_costs(rows)
    save(rows, curves[next(iter(STRATEGIES))][-1])


if __name__ == "__main__":
    main()
