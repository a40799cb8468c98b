"""What one call of a block holds for its backward: a *holder* for each value, one file for each choice.

A value is retained (`record/saved.py`, as recording retains too), compressed, offloaded, or rebuilt by replaying an
operator. The pack hook returns a slot for each saved tensor; a slot refers to a holder. Rules, cited where obeyed:

1. Slots refer to holders, holders to the holders that they are rebuilt from, nothing refers back. Without a reference
   cycle, autograd's release of a node frees at once what only that node needed.
2. `get` may be called any number of times, in any order: `retain_graph`, partial and repeated backward passes work. The
   count of uses only decides how long a restored tensor stays cached.
3. A retained or offloaded tensor that has been written to since raises, as autograd does without hooks.

To add a choice: write its holder here, open it in `_open` of `execute/call.py`, and offer it in `profile/codecs.py`.
"""

from ds_adacc.execute.holders.compressed import Compressed
from ds_adacc.execute.holders.offloaded import Offloaded
from ds_adacc.execute.holders.rebuilt import Rebuilt, Replay
from ds_adacc.record.saved import Retained

__all__ = ["Compressed", "Holder", "Offloaded", "Rebuilt", "Replay", "Retained"]

Holder = Retained | Compressed | Offloaded | Rebuilt
