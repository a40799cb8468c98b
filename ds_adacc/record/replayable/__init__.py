"""May backward replay an operator? Each is either verified to give the same bits again, or refused with a reason.

* `verify`: replays each operator as soon as it has run, and compares bits; `uninitialised`: tells memory that nobody
  has written to from what a kernel has made.
* `draws`: which operators draw random numbers, and from which state.
* `taint`: where Python has first read data; `made_of_numbers`: the tensors that hold no data, as they are made of
  Python's numbers alone.
* `late_refusals`: what else must not be replayed, which only the whole program tells.

The rules are in `ds_adacc/record/__init__.py`. The reasons that are sentences for the user are in
`program/refusals.py`.
"""
