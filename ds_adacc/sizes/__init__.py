"""Block types at input sizes at which they were not recorded: what they are there, and policies for them.

In comes a call whose sizes are new, and the programs that were recorded at other sizes. Out goes its block type, as
predicted, with policies that were adopted from a size that was planned for. Nothing is recorded, measured or solved for
it, and nothing is communicated: each rank does so for the sizes that it meets itself.

* `new_sizes`: predicts a block type at the sizes of a call, and has those forgotten that were not used of late.
* `symbolic_types`: the programs met so far, each with its sizes left open.
* `symbolic_program`: what such a program is at other sizes; `symbolic_profile`: what it costs there; `formula`: how a
  number follows the sizes.
* `origins`: which of the sizes of a program are planned for, and from which of these another one adopts.
* `adopter`: has block types adopt policies, from those of other sizes of their programs; `policy_search`: the search
  for policies that fit.
"""
