"""What a block's program depends on besides tensors: numbers, attributes, globals, and whatever else Python can reach.

A Python number is a constant of a recorded program. So this state is read before every call, and if any of it has
changed, the program is not used. The rules cited here are those of `record/`; Rule R8 is the main one.

* `closure`: what a callable can reach: modules, parameters, buffers, tensors, Python values.
* `reading`: the marks of all that, at one call. Other marks, another program.
* `plain_objects`: objects of plain numbers and tensors, such as a config, which are not read again while unchanged.
* `guards`: marks of Python values, of whatever kind; `tensor_marks`: those of tensors; `identity`: those by identity.
* `changes`: which marks differ from those of another call, and whether they are only numbers and containers;
  `guard_history`: which of them decide nothing, and which change too often, as earlier recordings tell.
* `function_marks`: what of a function, or of an attribute of a class, may change; `covered`: the forward that a runtime
  has put on a block, told from the user's own.
* `kept_results`: whether a function has answered with what it had computed before, which no guard can read.
* `held_tensors`: tensors in a module's lists, dicts and objects, and inside its quantized weights.
* `codes`: what stands in a function's code.
* `content`: what one Python object holds, or why that cannot be read; `libraries`: whether code is the user's own.
* `calls_in_c`: functions in C that read or write data, or start threads; what of TorchScript does.
* `places`: what functions read besides their arguments: where that is, what is there, and what was there when they read
  it. What a kernel in Python reads must not change before backward.
"""
