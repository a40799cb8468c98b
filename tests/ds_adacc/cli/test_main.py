"""The command finds its subcommands, and says what is wrong without a traceback."""

import io
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from rich.text import Text

from ds_adacc.cli import main as command
from ds_adacc.cli.answer import Answer, BadInput


@pytest.fixture
def subcommand(monkeypatch):
    """A subcommand whose `run` is the test's own."""

    def add(run):
        module = SimpleNamespace(add_arguments=lambda parser: None, run=run)
        monkeypatch.setitem(command.SUBCOMMANDS, "toy", "a toy")
        monkeypatch.setitem(sys.modules, "ds_adacc.cli.toy", module)

    return add


def test_the_answer_is_shown_in_words_or_as_json(subcommand, said):
    subcommand(lambda arguments: Answer({"x": [1, "é"]}, Text("words")))
    assert said("toy") == (0, "words\n", "")
    assert said("toy", "--json") == (0, '{\n  "x": [\n    1,\n    "\\u00e9"\n  ]\n}\n', "")


def test_only_a_terminal_or_columns_limit_the_width(subcommand, said, monkeypatch):
    subcommand(lambda arguments: Answer({}, Text("word " * 900 + "end")))
    assert max(map(len, said("toy")[1].splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")
    assert said("toy")[1] == "word " * 900 + "end\n"
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert command.main(["toy"]) == 0
    assert len(terminal.getvalue().splitlines()) > 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_no_is_exit_code_1(subcommand, said):
    subcommand(lambda arguments: Answer({}, Text("words"), is_yes=False))
    assert said("toy") == (1, "words\n", "")
    assert said("toy", "--json") == (1, "{}\n", "")


def test_bad_input_is_exit_code_2_and_a_line_on_stderr(subcommand, said):
    def run(arguments):
        raise BadInput("no such thing")

    subcommand(run)
    for options in ((), ("--json",)):
        assert said("toy", *options) == (2, "", "ds_adacc toy: no such thing\n")


def test_what_libraries_print_is_no_part_of_the_document(subcommand, said):
    def run(arguments):
        print("library: hello")
        return Answer({}, Text("words"))

    subcommand(run)
    assert said("toy", "--json") == (0, "{}\n", "library: hello\n")


def test_what_libraries_print_as_they_are_imported_is_not_either(subcommand, said, monkeypatch):
    def imported(name):
        print("library: imported")
        return sys.modules[name]

    subcommand(lambda arguments: Answer({}, Text("words")))
    monkeypatch.setattr(command, "importlib", SimpleNamespace(import_module=imported))
    assert said("toy", "--json") == (0, "{}\n", "library: imported\n")


def test_a_subcommand_that_cannot_be_imported_points_to_doctor(said, monkeypatch):
    monkeypatch.setitem(sys.modules, "ds_adacc.cli.report", None)
    code, out, told = said("report")
    assert (code, out) == (2, "")
    assert told.startswith("ds_adacc report: ModuleNotFoundError: import of ds_adacc.cli.report halted")
    assert told.endswith(". `ds_adacc doctor` tells what is missing or does not work\n")


@pytest.mark.parametrize("arguments", [[], ["rebort"], ["--json"], ["report", "--jsn"], ["report", "a", "b"]])
def test_bad_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "usage: ds_adacc" in err


def test_help_names_every_subcommand(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and text in out for name, text in command.SUBCOMMANDS.items())


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"ds_adacc {metadata.version('ds_adacc')}\n")


@pytest.mark.parametrize("name", command.SUBCOMMANDS)
def test_every_subcommand_has_help_and_json(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: ds_adacc {name} ") and "--json" in out


def test_the_module_is_the_command():
    (script,) = [entry for entry in metadata.entry_points(group="console_scripts") if entry.name == "ds_adacc"]
    assert script.load() is command.main
    child = subprocess.run([sys.executable, "-m", "ds_adacc", "report", "/nowhere"], capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (2, "")
    assert child.stderr == "ds_adacc report: /nowhere: No such file or directory\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(subcommand, monkeypatch, options):
    """`ds_adacc report | head -1`."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    subcommand(lambda arguments: Answer({}, Text("words")))
    monkeypatch.setattr(sys, "stdout", Closed())
    assert command.main(["toy", *options]) == 0
