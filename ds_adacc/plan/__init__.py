"""From profiles to policies that all ranks run: the plan.

In come the block types that this process has met, with their profiles and the order in which their blocks run, and a
memory budget. Out comes a `Plan`: a policy for each block, the same on every rank.

The files, in the order in which a plan comes about:

* `block_type`: what this process knows of a block type, and the plan that it runs.
* `forward_order`: which block comes when, the one owner of a block's index; `passes`: how many calls were alive at
  once; `live_sets`: which block types share the budget.
* `budget`: the bytes that activations may take; `available`: those that are left on the device; `step_peak`: a CUDA
  device's peak, without what recording takes of it.
* `correction`, `placed_inputs`, `outlier_prices`: bytes that a profile does not tell, counted in.
* `coordinator`: makes all ranks agree on a plan. `ranks`: how they exchange what they know; `rank_reports`: what that
  is, and how it is merged; `merged_graph`: one graph of several; `repeated_collectives`: which blocks' second forwards
  all ranks run.
* `plan`: what there is to plan for, and the plan; `solve`: asks the planner for policies; `comparison`: what simpler
  plans would cost; `budget_error`: the error of a budget that no plan fits, in the user's words.
* `agreement`: the policies in force, and what else the ranks have agreed on; `peak_estimate`: what calls take together
  under these.
* `approvals`: which policies each block may run, by the gradient errors measured on it.
"""
