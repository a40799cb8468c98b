"""A block's program: what it consists of, and how one operator of it runs again.

A program has operators (ATen calls, and calls of `autograd.Function`), values (tensors), and the order in which
autograd saves them. `record/` writes it down; the rooms above read it and replay parts of it. The rules cited here are
those of `record/`.

* `recording`: the program: values, operators, positions of the pack hook; `recorded_op`: one operator; `arguments`:
  what it is called with; `parameters`: the block's, by index.
* `backward_graph`: the nodes of autograd's graph, along which backward runs; `with_gradient`: the values that get one.
* `signature`: what tells two calls of a block apart: shapes, dtypes, strides, other arguments, default dtype, autocast.
* `geometry`: where a view lies in memory; `same_bits`: whether two tensors have the same bits.
* `schema`: what an operator's schema tells: what it writes to, what it computes with; `refusals`: why an operator must
  not be replayed.
* `function_operator`: a call of an `autograd.Function` as an operator; `registration`: what the user tells of one;
  `known_functions`: which operator of ATen one is like, by its name; `module_class`: the class of a module, compiled or
  not; `graphs`: those that torch.compile has made; `nodes`: autograd's nodes behind a tensor, which tell the graphs
  that have run; `compiled_backward`: may the backward of a graph be run ahead of training's own.
* `replay`: runs one operator again; `generators`: puts a random generator into a state; `random_states`: the states of
  all generators, for a second forward; `dispatch_modes`: turns on those of the user's; `transforms`: leaves vmap.
* `slots`: what autograd holds in place of a saved tensor, and the holder that retains a value; `stand_in`: gives
  backward a parameter with its attributes.
"""
