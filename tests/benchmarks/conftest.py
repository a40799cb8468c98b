"""The benchmarks import one another and the examples as scripts do: from their own folders."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Behind the other folders: benchmarks/codecs.py and planner.py have names that others have too.
sys.path.extend(str(ROOT / folder) for folder in ("benchmarks", "examples"))
