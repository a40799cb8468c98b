"""What a recorded value is called, and what it is in the model: by that the plan chooses codecs.

* `labels`: what the user would call a value: the module and the tensor.
* `roles`: which layer a value belongs to, read off the operators; `roles_inside`: the same for what the graphs of
  torch.compile save.
* `masks`: which values have two values in every call; `extremes`: which ones a mask may fill with Inf or a huge number
  later.

The rules are in `ds_adacc/record/__init__.py`.
"""
