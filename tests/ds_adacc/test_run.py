"""`ds_adacc.run` without any launcher: what the script sees, and what is said if there is none."""

import contextlib
import json
import sys
import types

import deepspeed
import pytest

import ds_adacc.engine.patch_initialize
from ds_adacc import checkpointing
from ds_adacc.engine.patch_checkpointing import CHECKPOINT
from ds_adacc.engine.patch_initialize import patch_deepspeed
from ds_adacc.run import main

SCRIPT = """
import json, sys
import helper
from deepspeed import initialize
seen = {"name": __name__, "argv": sys.argv, "file": __file__, "path": sys.path[0], "from": initialize.__module__}
open(helper.OUT, "w").write(json.dumps(seen))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script in a folder of its own, beside a module that it imports; all of the process is put back."""
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    for name in ("checkpoint", "non_reentrant_checkpoint", "configure", "partition_activations_in_checkpoint"):
        monkeypatch.setattr(deepspeed.checkpointing, name, getattr(deepspeed.checkpointing, name))
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    (tmp_path / "helper.py").write_text(f"OUT = {str(tmp_path / 'seen.json')!r}")
    path = tmp_path / "walk.py"
    path.write_text(SCRIPT)
    yield path
    sys.modules.pop("helper", None)


def seen(script):
    return json.loads((script.parent / "seen.json").read_text())


def test_a_script_runs_as_if_launched_itself(script):
    main(["--local_rank=3", str(script), "--lr", "0.1"])
    assert seen(script) == {
        "name": "__main__",
        "argv": [str(script), "--local_rank=3", "--lr", "0.1"],
        "file": str(script),
        "path": str(script.parent),
        "from": "ds_adacc.engine.api",
    }


def test_deepspeeds_checkpoint_is_replaced_before_it_imports_it(script):
    place = "deepspeed.runtime.activation_checkpointing.checkpointing"
    script.write_text(f"import helper\nfrom {place} import checkpoint, configure\nhelper.note(checkpoint, configure)")
    found = []
    sys.modules["helper"] = types.SimpleNamespace(note=lambda *functions: found.extend(functions))
    own = deepspeed.checkpointing.configure
    main([str(script)])
    assert [function.__wrapped__ for function in found] == [CHECKPOINT, own]


def test_a_module_runs_too(script, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))
    main(["-m", "walk", "--local_rank=5"])
    assert seen(script)["name"] == "__main__"
    assert seen(script)["argv"] == [str(script), "--local_rank=5"]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_says_how_it_is_called(option, capsys):
    main([option])
    assert "deepspeed --module ds_adacc.run train.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: deepspeed --module ds_adacc.run"),
        (["--local_rank=0"], "usage: deepspeed --module ds_adacc.run"),
        (["--local_rank=0", "nowhere.py"], "there is no script 'nowhere.py' in "),
        (["-m", "nowhere"], "there is no module 'nowhere' to import"),
        (["-m", "no.where"], "there is no module 'no.where' to import"),
    ],
)
def test_exit_code_2_and_a_reason_where_there_is_no_script(arguments, said, capsys):
    before = deepspeed.initialize
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert deepspeed.initialize is before


@pytest.mark.parametrize("ending", ["", "sys.exit(0)", "sys.exit()"])
def test_a_script_that_never_called_deepspeed_is_told_so_at_its_end(script, ending, monkeypatch, caplog):
    """accelerate runs a script under DDP if its config does not say DeepSpeed."""
    monkeypatch.setattr(checkpointing.registry, "has_started", False)
    script.write_text(f"import sys\n{ending}")
    with caplog.at_level("WARNING", logger="ds_adacc"), contextlib.suppress(SystemExit):
        main([str(script)])
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "adacc did nothing: the script has ended without a call of deepspeed.initialize or ds_adacc.attach. "
    )


def test_the_help_of_a_script_is_no_training(script, caplog):
    script.write_text("import sys\nsys.exit()")
    with caplog.at_level("WARNING", logger="ds_adacc"), contextlib.suppress(SystemExit):
        main([str(script), "--help"])
    assert not caplog.records


@pytest.mark.parametrize(
    "ending",
    [
        "import deepspeed; deepspeed.initialize(config={'adacc': {}})",
        "import ds_adacc; ds_adacc.initialize(config={'adacc': {'enabled': False}})",
        "import ds_adacc\ntry: ds_adacc.attach(None)\nexcept TypeError: pass",
        "sys.exit(3)",
        "1 / 0",
    ],
)
def test_a_script_that_called_it_or_failed_is_not(script, ending, monkeypatch, caplog):
    monkeypatch.setattr(checkpointing.registry, "has_started", False)
    engine = types.SimpleNamespace(adacc=object())
    monkeypatch.setattr(ds_adacc.engine.api, "deepspeed_initialize", lambda **_: (engine, None, None, None))
    script.write_text(f"import sys\n{ending}")
    with caplog.at_level("WARNING", logger="ds_adacc"), contextlib.suppress(SystemExit, ZeroDivisionError):
        main([str(script)])
    assert not caplog.records


def test_an_engine_that_is_not_served_is_told_of_once(script, monkeypatch, caplog):
    engines = [types.SimpleNamespace(adacc=object()), types.SimpleNamespace()]
    monkeypatch.setattr(ds_adacc.engine.patch_initialize, "initialize", lambda **_: (engines.pop(), None, None, None))
    patch_deepspeed()
    with caplog.at_level("WARNING", logger="ds_adacc"):
        deepspeed.initialize()
        deepspeed.initialize()
    (record,) = caplog.records
    assert record.getMessage().startswith("adacc is off: ")
