"""The benchmarks import one another and the examples as scripts do: from their own folders."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Behind the other folders: benchmarks/planner.py has a name that others have too.
sys.path.extend(str(ROOT / folder) for folder in ("benchmarks", "benchmarks/gpu", "examples"))
