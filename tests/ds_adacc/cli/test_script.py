"""Whether a script enables ds_adacc is read off its text; it is not run."""

import json

import pytest

SECTION = {"adacc": {"memory_budget": 0.5}}
PLAIN = "import torch\nimport deepspeed\n\nengine, *_ = deepspeed.initialize(model=model, config='ds_config.json')\n"
FROM = "from deepspeed import initialize\nengine, *_ = initialize(model=model)\n"
ACCELERATE = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
TRAINER = "from transformers import Trainer\nTrainer(model, arguments).train()\n"
TRL = "from trl import DPOTrainer\nDPOTrainer(model).train()\n"
OTHER_NAME = "from transformers import Trainer as Base\nBase(model).train()\n"
SUBCLASS = "import transformers\nclass Mine(transformers.Trainer):\n    pass\nMine(model).train()\n"
MIXIN = "import transformers as t\nfrom my import Loud\nclass Mine(Loud, t.Trainer):\n    pass\nMine(model).train()\n"
ASSIGNED = "import transformers as t\nBase = T = t.Trainer\nT(model).train()\n"
GENERIC = "from transformers import Trainer\nclass Mine(Trainer[int]):\n    pass\nMine[int](model).train()\n"
STARRED = "from my import *\nfrom transformers import *\nclass Mine(Loud, Trainer):\n    pass\nMine(model).train()\n"
LIGHTNING = "import lightning.pytorch as pl\npl.Trainer(strategy='deepspeed').fit(model)\n"


@pytest.fixture(autouse=True)
def no_other_findings(monkeypatch):
    monkeypatch.setattr("ds_adacc.cli.doctor.findings", list)


def looked(document, tmp_path, config, script):
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(script)
    paths = str(tmp_path / "ds_config.json"), str(tmp_path / "train.py")
    code, told = document("doctor", "--config", paths[0], "--script", paths[1])
    return code, {finding["name"]: finding for finding in told["findings"]}


@pytest.mark.parametrize(
    ("script", "called", "line", "remedy"),
    [
        (PLAIN, "deepspeed's initialize", 4, "call ds_adacc.initialize"),
        (FROM, "deepspeed's initialize", 2, "call ds_adacc.initialize"),
        (TRAINER, "transformers's Trainer", 2, "`from ds_adacc.huggingface import AdaccCallback`, and pass "),
        (TRL, "trl's DPOTrainer", 2, "`from ds_adacc.huggingface import AdaccCallback`, and pass "),
        (OTHER_NAME, "transformers's Trainer", 2, "`from ds_adacc.huggingface import AdaccCallback`, and pass "),
        (SUBCLASS, "transformers's Trainer", 4, "`from ds_adacc.huggingface import AdaccCallback`, and pass "),
        (MIXIN, "transformers's Trainer", 5, "`from ds_adacc.huggingface import AdaccCallback`, and pass "),
        (ASSIGNED, "transformers's Trainer", 3, "`from ds_adacc.huggingface import AdaccCallback`, and pass "),
        (GENERIC, "transformers's Trainer", 4, "`from ds_adacc.huggingface import AdaccCallback`, and pass "),
        (STARRED, "transformers's Trainer", 5, "`from ds_adacc.huggingface import AdaccCallback`, and pass "),
        (LIGHTNING, "lightning's Trainer", 2, "call ds_adacc.attach(trainer.strategy.model) in the on_fit_start "),
        (ACCELERATE, "accelerate's Accelerator", 2, "call ds_adacc.attach(model)"),
        (PLAIN.replace("import torch", "import ds_adacc"), "deepspeed's initialize", 4, "call ds_adacc.initialize"),
    ],
)
def test_a_script_that_nothing_serves(document, tmp_path, script, called, line, remedy):
    code, found = looked(document, tmp_path, SECTION, script)
    assert code == 1
    assert found["section"]["fine"] and not found["script"]["fine"]
    said = f"train.py calls {called} in line {line}, and nothing that enables ds_adacc: the section does nothing"
    assert found["script"]["detail"].endswith(said)
    assert found["script"]["remedy"].startswith(remedy)
    launcher = "accelerate launch" if script is ACCELERATE else "deepspeed"
    assert f"{launcher} --module ds_adacc.run SCRIPT" in found["script"]["remedy"]


@pytest.mark.parametrize(
    ("script", "name", "line"),
    [
        (
            PLAIN.replace("import torch", "import ds_adacc").replace("= deepspeed.", "= ds_adacc."),
            "initialize",
            4,
        ),
        (PLAIN.replace("import torch", "import ds_adacc as ours") + "ours.attach(engine)", "attach", 5),
        ("from ds_adacc import initialize\n" + FROM.partition("\n")[2], "initialize", 1),
        ("from ds_adacc.huggingface import AdaccCallback\n" + TRAINER, "huggingface", 1),
        ("import ds_adacc.checkpointing as checkpointing\n" + PLAIN, "checkpointing", 1),
        ("from ds_adacc.engine.api import initialize\n", "engine", 1),
        ("import ds_adacc.engine.api\n", "engine", 1),
        ("from ds_adacc import *\n", "*", 1),
        ("from ds_adacc.run import main\n", "run", 1),
    ],
)
def test_a_script_that_enables_it(document, tmp_path, script, name, line):
    code, found = looked(document, tmp_path, SECTION, script)
    assert (code, found["script"]["fine"], found["section"]["fine"]) == (0, True, True)
    assert found["script"]["detail"].endswith(f"train.py uses ds_adacc.{name} in line {line}")


@pytest.mark.parametrize(
    ("use", "line"),
    [
        ("engine, *_ = (ds_adacc if on else deepspeed).initialize(model=model)\n", 5),
        ("backend = deepspeed\nif on:\n    backend = ds_adacc\nengine, *_ = backend.initialize(model=model)\n", 7),
        ("engine, *_ = getattr(ds_adacc if on else deepspeed, 'initialize')(model=model)\n", 5),
    ],
)
def test_a_script_that_may_enable_it(document, said, tmp_path, use, line):
    """What the usual switch between the two calls is known only when it runs."""
    script = "import sys\nimport ds_adacc\nimport deepspeed\non = '--adacc' in sys.argv\n" + use
    code, found = looked(document, tmp_path, SECTION, script)
    assert (code, found["script"]["fine"], found["script"]["remedy"]) == (0, None, "")
    path = tmp_path / "train.py"
    assert found["script"]["detail"].startswith(f"cannot tell: {path} uses ds_adacc itself as a value in line {line}")
    code, out, _ = said("doctor", "--script", str(path))
    assert code == 0
    assert "  script  ?      required  cannot tell: " in out and out.endswith("\nds_adacc can run here\n")


@pytest.mark.parametrize("imported", ["import deepspeed", "from deepspeed import *"])
def test_a_function_of_the_script_is_not_taken_for_deepspeeds(document, tmp_path, imported):
    script = f"{imported}\nfrom setup import engine\ndef initialize(): ...\ninitialize()()\n"
    _, found = looked(document, tmp_path, SECTION, script)
    assert "train.py does not import ds_adacc, so the section does nothing, unless" in found["script"]["detail"]


def test_a_script_that_imports_it_for_something_else(document, tmp_path):
    code, found = looked(document, tmp_path, SECTION, "import ds_adacc\nprint(ds_adacc.__version__)\n")
    assert code == 1
    assert "train.py uses nothing that enables ds_adacc, so the section does nothing" in found["script"]["detail"]


def test_a_config_without_a_section(document, tmp_path, monkeypatch):
    code, found = looked(document, tmp_path, {"fp16": {"enabled": False}}, "import ds_adacc; ds_adacc.initialize()")
    assert (code, found["section"]["fine"]) == (1, False)
    assert "ADACC_CONFIG" in found["section"]["remedy"]
    monkeypatch.setenv("ADACC_CONFIG", '{"memory_budget": 0.5}')
    code, found = looked(document, tmp_path, {}, "import ds_adacc; ds_adacc.initialize()")
    assert (code, found["section"]["detail"]) == (0, 'the "adacc" section from ADACC_CONFIG is valid')


def test_a_section_with_a_mistake(document, tmp_path):
    code, found = looked(
        document, tmp_path, {"adacc": {"memory_budgett": 0.5}}, "import ds_adacc; ds_adacc.initialize()"
    )
    assert code == 1
    assert "adacc.memory_budgett = 0.5: unknown key" in found["section"]["detail"]
    assert found["section"]["remedy"] == ""


def test_the_machine_and_the_program_are_told_apart(said, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    code, out, _ = said("doctor", "--script", str(script))
    assert code == 1
    last = "Your program cannot use ds_adacc as it is: see script above"
    assert out.endswith(f"\nds_adacc can run here\n{last}\n")


@pytest.mark.parametrize("option", ["--script", "--config"])
def test_a_file_that_is_not_there(said, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    code, out, err = said("doctor", option, "trian.py")
    assert (code, out, err) == (2, "", f"ds_adacc doctor: there is no file 'trian.py' in {tmp_path}\n")
