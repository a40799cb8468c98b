"""What one call of a block holds for its backward: a *holder* for each value, one file for each choice.

A value is retained (`program/slots.py`, since recording retains as well), compressed, offloaded, compressed with its
payload offloaded, or recomputed by replaying an operator. `restored.py` has what compressed and offloaded values share.
The rules are in `ds_adacc/execute/__init__.py`.
"""

from ds_adacc.execute.holders.compressed import Compressed, Compression
from ds_adacc.execute.holders.offloaded import Offloaded
from ds_adacc.execute.holders.offloaded_payload import OffloadedPayload
from ds_adacc.execute.holders.recomputed import Recomputed, Replay
from ds_adacc.execute.holders.restored import ValueFacts
from ds_adacc.program.slots import Retained

__all__ = [
    "Compressed",
    "Compression",
    "Offloaded",
    "OffloadedPayload",
    "Recomputed",
    "Replay",
    "Retained",
    "ValueFacts",
]
