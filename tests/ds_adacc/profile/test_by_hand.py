"""What ds_adacc/README.md has one do with a block by hand prints what it says."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[3] / "ds_adacc" / "README.md"


def test_the_block_by_hand_prints_what_the_readme_says(capsys):
    text = README.read_text()
    section = text[text.index("## A block by hand\n") : text.index("## The way of a tensor\n")]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    exec(code, {"__name__": "by_hand"})
    said = re.findall(r"^    (.*)$", section[section.index("It prints:") :], re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
