"""Where profiles are kept on disk. It imports nothing that `ds_adacc doctor` may find missing."""

from __future__ import annotations

from pathlib import Path

from ds_adacc.environment import cache_folder

SUFFIX = ".json"  # of each profile's file


def default_path() -> Path:
    """`profiles`, a folder in the user's cache folder."""
    return cache_folder() / "profiles"


def sizes(folder: Path) -> list[int]:
    """The bytes of each profile's file. Writes nothing. Raises OSError for a folder that cannot be read."""
    return [path.stat().st_size for path in folder.iterdir() if path.suffix == SUFFIX] if folder.exists() else []
