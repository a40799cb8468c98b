"""What Python itself does while a block is recorded, or followed.

A guard needs a place where it can read a number again before each later call. The functions that run meanwhile show
which places those are. Some numbers have no such place, and some of a tensor's data reach Python without the
dispatcher: then nothing that may follow from them is replayed. The rules cited here are those of `record/`.

* `watch`: is told of Python's calls: they read globals, random numbers, the clock, a tensor's data; they call
  collectives. `listener`: all that it tells the recorder.
* `code_places`: which globals and class attributes the names in a function's code tell of.
* `collectives`: the functions that are collectives.
* `callers`: who calls what runs then: a compiler, an import, or ds_adacc itself.
* `function_watch`: follows the calls of `autograd.Function`s.
* `collector`: keeps Python's collector of garbage from running meanwhile.
"""
