"""A file that is there as a whole or not at all. The rooms of `ds_adacc` use it too; this package is the lowest."""

import os
import uuid
from pathlib import Path


def atomic_write(path: Path, content: bytes | memoryview) -> None:
    """Write `content` to a file beside `path`, and rename that: who reads `path` finds all of it, or what was there.

    Makes the folder if there is none. Raises OSError; leaves nothing behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by the process's number: a process of another machine, on the same disk, may have the same one.
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
