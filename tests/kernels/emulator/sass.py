"""The machine code (SASS) of CUDA kernels, as NVIDIA's cuobjdump prints it."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([\w.]+)\s*([^;]*);", re.MULTILINE)
_FUNCTION = re.compile(r"Function : (\w+)\n(.*?)(?=Function : |\Z)", re.DOTALL)


class Instruction(NamedTuple):
    """`opcode` is the mnemonic and its modifiers, as ("IMAD", "WIDE", "U32")."""

    address: int
    guard: str
    opcode: tuple[str, ...]
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.address:#x} {'.'.join(self.opcode)} {', '.join(self.operands)}"


def disassembler() -> str | None:
    """Return the folder of cuobjdump and nvdisasm, on the PATH or from NVIDIA's wheels; None if they are not here."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else []
    wheels = [str(path) for root in roots for path in Path(root).glob("*/bin")]
    for folder in [*os.environ["PATH"].split(os.pathsep), *wheels]:
        if all(shutil.which(tool, path=folder) for tool in ("cuobjdump", "nvdisasm")):
            return folder
    return None


def disassemble(cubin: bytes) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel of a cubin, in the order of their addresses."""
    tools = disassembler()
    environment = os.environ | {"PATH": os.pathsep.join([tools, os.environ["PATH"]])}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin + b"\0")  # CuPy leaves out the last byte, which is zero
        command = [f"{tools}/cuobjdump", "-sass", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return {name: list(_parsed(text)) for name, text in _FUNCTION.findall(done.stdout)}


def _parsed(text: str) -> Iterator[Instruction]:
    for address, guard, opcode, operands in _LINE.findall(text):
        split = tuple(operand.strip() for operand in operands.split(",")) if operands.strip() else ()
        yield Instruction(int(address, 16), guard, tuple(opcode.split(".")), split)
