"""The command line: find the subcommand, show its answer, set the exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from rich.console import Console

from ds_adacc.cli.answer import BadInput

# Each is a module beside this one, with `add_arguments(parser)` and `run(arguments) -> Answer` that may raise BadInput.
SUBCOMMANDS = {
    "plan": "plan before any training: what fits a budget, what it costs, how large the micro-batch may be",
    "report": "show what a run did: its plans, what they predicted and what was observed",
    "doctor": "show what is installed and works here, and how to mend what does not",
}
YES, NO, BAD_INPUT = 0, 1, 2  # exit codes; argparse has the last one for bad usage
_UNLIMITED = 10_000  # columns of a pipe or a file; tables take what they need of them


class _Console(Console):
    """Stdout, as wide as the terminal; without one as COLUMNS says, or as wide as need be."""

    def __init__(self) -> None:
        is_limited = sys.stdout.isatty() or "COLUMNS" in os.environ
        super().__init__(width=None if is_limited else _UNLIMITED)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich's own exits with 1, which says NO here


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or the process's own. Returns the exit code."""
    commands = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        commands.print_help(sys.stderr)
        commands.exit(BAD_INPUT)
    chosen = commands.parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print as they are imported is no part of the answer
        # the chosen one alone: `doctor` must run where the others cannot be imported
        try:
            subcommand = importlib.import_module(f"ds_adacc.cli.{chosen.subcommand}")
        except Exception as error:  # whatever another package raises
            text = f"{type(error).__name__}: {error}. `ds_adacc doctor` tells what is missing or does not work"
            print(f"{commands.prog} {chosen.subcommand}: {text}", file=sys.stderr)
            return BAD_INPUT
    parser = argparse.ArgumentParser(prog=f"ds_adacc {chosen.subcommand}", description=SUBCOMMANDS[chosen.subcommand])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout, all else on stderr")
    subcommand.add_arguments(parser)
    arguments = parser.parse_args(chosen.arguments)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no part of the answer
            answer = subcommand.run(arguments)
    except BadInput as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return BAD_INPUT
    with contextlib.suppress(BrokenPipeError):  # `| head` has seen enough
        if arguments.json:
            print(json.dumps(answer.document, indent=2, allow_nan=False))
        else:
            _Console().print(answer.view)
        sys.stdout.flush()
    return YES if answer.is_yes else NO


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_adacc",
        usage="ds_adacc [--version] SUBCOMMAND [--help] ...",
        description="Adaptive activation checkpointing for DeepSpeed.",
        epilog="\n".join(["subcommands:", *(f"  {name:10}{text}" for name, text in SUBCOMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ds_adacc {metadata.version('ds_adacc')}")
    parser.add_argument("subcommand", choices=SUBCOMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
