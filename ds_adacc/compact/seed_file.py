"""The file in a checkpoint with the seed of the projections. All else is in DeepSpeed's own files.

These hold the weights under the model's own names, the optimizer's compressed states, and the numbers of steps, from
which the epoch of the projections follows. The proxies are zero between steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_adacc.compact.compact import Compact

_NAME = "adacc_compact.json"


def write(compact: Compact, folder: Path) -> None:
    """Save the seed and the layers' ranks in the checkpoint's folder. The first rank calls. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"seed": compact.seed, "ranks": compact.ranks}
    (folder / _NAME).write_text(json.dumps(document, indent=1) + "\n")


def read(compact: Compact | None, folder: Path) -> int | None:
    """The seed of the run that was saved in the folder; None if neither run has compressed states.

    Raises ValueError if the optimizer's states there have other shapes than those of this run.
    """
    file = folder / _NAME
    saved: Mapping[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    if saved is None and compact is None:
        return None
    if saved is None:
        raise ValueError(
            _other(folder, "was saved without adacc.compact, or is a universal one, which lacks its weights")
        )
    if compact is None:
        raise ValueError(_other(folder, "was saved with adacc.compact, which this run does not have"))
    for name in {**saved["ranks"], **compact.ranks}:
        before, now = saved["ranks"].get(name), compact.ranks.get(name)
        if before != now:
            was, is_now = ("not served" if rank is None else f"of rank {rank}" for rank in (before, now))
            raise ValueError(_other(folder, f"has layer {name!r} {was}, and this run has it {is_now}"))
    return int(saved["seed"])


def _other(folder: Path, why: str) -> str:
    return (
        f"adacc.compact: the checkpoint {folder} {why}, so the shapes of its optimizer states differ. Load the weights "
        "alone, with load_module_only=True (under ZeRO-3 load what zero_to_fp32.py makes into the model, before "
        "ds_adacc.initialize), or use the settings that it was saved with"
    )
