"""From profiles to policies that all ranks run: the plan.

In come the block types that this process has met, with their profiles and the order in which their blocks run, and a
memory budget. Out comes a `Plan`: a policy for each block, the same on every rank.

* `block_type`: what this process knows of a block type, and what all ranks have agreed on for it;
* `forward_order`: which block comes when, the one owner of a block's index;
* `budget`: the bytes that activations may take; `available`: those that are left on the device; `step_peak`: a CUDA
  device's peak, without what recording takes of it;
* `agreement`: what the ranks have agreed on; `coordinator` changes it on all of them at once;
* `rank_reports`: merges what the ranks have measured, and `ranks` is how they exchange it; `merged_graph`: one graph of
  several;
* `repeated_collectives`: which blocks' second forwards all ranks run, as these call collectives;
* `passes`: how many calls were alive at once; `peak_estimate`: what they take together;
* `plan`: what there is to plan for, and the plan; `solve`: asks the planner for policies; `live_sets`: which block
  types share the budget; `comparison`: what simpler plans would cost;
* `budget_error`: the error of a budget that no plan fits, in the user's words;
* `symbolic_types`: programs whose input sizes vary; `new_sizes`: such a program at sizes that were not recorded;
* `adopter`: policies for these without a plan, from those of other sizes; `policy_search`: the search for them;
* `approvals`: which policies each block may run, by the gradient errors measured on it;
* `correction`, `placed_inputs`, `outlier_prices`: bytes that a profile does not tell, counted in.
"""
