"""Plan before any training: what fits a budget, what it costs, and how large the micro-batch may be."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ds_adacc import planner
from ds_adacc.cli.answer import Answer, BadInput
from ds_adacc.cli.factory import Factory, Recorded, check_sizes, record
from ds_adacc.cli.plan_computation import Planned, Stage, plan
from ds_adacc.cli.plan_view import document, labels_of, view
from ds_adacc.config import SECTION, AdaccConfig, ConfigError, read, section_of

_STAGES = 6
_MICRO_BATCH = "train_micro_batch_size_per_gpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The config, the factory, sizes, the budget, and where figures go."""
    parser.add_argument("ds_config", help='a DeepSpeed config with an "adacc" section')
    parser.add_argument(
        "factory",
        metavar="MODULE:FUNCTION",
        help="your function, such as big:make for `make` in big.py in the current directory. It is called with a "
        "micro-batch size, and returns (model, inputs): the model, and the arguments of one forward as a tensor, a "
        "tuple or a dict. The loss is the output's `loss` if it has one, else the sum of all that is floating-point in "
        "it",
    )
    text = (
        "the micro-batch size to plan for (by default the function's own default, or else that of the config), and "
        "another to estimate from (by default twice that)"
    )
    parser.add_argument("--batch", type=int, nargs="+", metavar="N", help=text)
    parser.add_argument("--budget", help="in place of the section's memory_budget: auto, 12GiB, 0.4")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write plan.json and figures (PNG and SVG) here")


def run(arguments: argparse.Namespace) -> Answer:
    """The plan. The answer is no if no plan fits. Raises BadInput."""
    section, configured = _read(arguments.ds_config, arguments.budget)
    factory = Factory(arguments.factory)
    batches = _batches(arguments.batch or [_default_batch(factory, configured)])
    if arguments.out:  # before a minute of work is lost
        _require_plots()
        _make_folder(arguments.out)
    with _stages() as stage:
        first, second = (_record(factory, section, batch, stage) for batch in batches)
        check_sizes(factory, first, second)
        planned = plan((first, second), section, stage)
        shown = {"factory": factory.text, **document(planned)}
        written = _write(planned, shown, arguments.out) if arguments.out else []
    parts = [view(planned), *(Text(f"wrote {path}") for path in written)]
    return Answer(shown, Group(*parts), planned.solution is not None)


def _read(path: str, budget: str | None) -> tuple[AdaccConfig, Any]:
    """The section, and the micro-batch size of the config: None without one, and "auto" if that is what it says."""
    try:
        config = read(path)
        if budget is not None and isinstance(config.get(SECTION), dict):
            config = {**config, SECTION: {**config[SECTION], "memory_budget": _number(budget)}}
        section = section_of(config)
    except ConfigError as error:
        raise BadInput(str(error)) from error
    if section is None:
        raise BadInput(f'{path}: has no "{SECTION}" section, or it is disabled')
    return section, config.get(_MICRO_BATCH)


def _number(text: str) -> int | float | str:
    """The budget as JSON would have it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _default_batch(factory: Factory, configured: Any) -> int:
    size = factory.default_batch or configured
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    config = f"the config has no {_MICRO_BATCH}" if size is None else f"{_MICRO_BATCH} is {size!r} in the config"
    raise BadInput(f"function {factory.text!r} has no default micro-batch size, and {config}; give one with --batch")


def _batches(sizes: list[int]) -> tuple[int, int]:
    if len(sizes) > 2 or min(sizes) < 1:
        raise BadInput(f"--batch {' '.join(map(str, sizes))}: give one or two sizes of at least 1")
    first, second = (*sizes, 2 * sizes[0])[:2]
    if first == second:
        raise BadInput(f"--batch {first} {second}: the sizes must differ")
    return first, second


def _record(factory: Factory, section: AdaccConfig, batch: int, stage: Stage) -> Recorded:
    stage(f"recording and measuring at micro-batch {batch}")
    return record(factory, section, batch)


@contextmanager
def _stages() -> Iterator[Stage]:
    """A progress bar on stderr, which each call of the stage moves by one; a line for each if that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print(f"{text} ...", file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=_STAGES, completed=-1)
        yield lambda text: progress.update(task, description=text, advance=1)


def _require_plots() -> None:
    try:
        import ds_adacc.cli.plots  # noqa: F401
    except ImportError as error:
        raise BadInput(f"--out draws with matplotlib: pip install 'ds_adacc[plots]' ({error})") from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {folder}: {error}") from error


def _write(planned: Planned, shown: dict[str, Any], folder: Path) -> list[Path]:
    """Write plan.json and the figures: for each block type its frontier and a graph per policy, and one timeline."""
    from ds_adacc.cli import plots

    written = [folder / "plan.json"]
    try:
        written[0].write_text(json.dumps(shown, indent=2, allow_nan=False) + "\n")
        for name, figure in _figures(planned):
            written += plots.save(figure, folder, name)
    except OSError as error:
        raise BadInput(f"--out {folder}: {error}") from error
    return written


def _figures(planned: Planned) -> Iterator[tuple[str, Any]]:
    from ds_adacc.cli import plots

    problem, solution = planned.problem, planned.solution
    for place, block_type in enumerate(problem.block_types, start=1):
        chosen = solution.policies[place - 1] if solution else ()
        yield (
            f"frontier-{place}",
            plots.frontier_figure(
                block_type, planned.frontiers[block_type.name], planned.policies[block_type.name], chosen
            ),
        )
        for number, policy in enumerate(dict.fromkeys(chosen), start=1):
            blocks = f"{chosen.count(policy)} of {len(chosen)} blocks"
            labels = labels_of(planned, place - 1)
            figure = plots.graph_figure(block_type.profile, policy, labels, f"{block_type.name}: {blocks}")
            yield f"graph-{place}-{number}", figure
    if problem.order:
        full = planner.everywhere(planner.recompute_policy, problem).policies
        plans = {"full checkpointing": full, **({"plan": solution.policies} if solution else {})}
        yield "timeline", plots.timeline_figure(problem, plans, planned.budget)
