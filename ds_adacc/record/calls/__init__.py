"""What the dispatcher, or Python, tells the recorder of a call, and what runs inside that call.

* `operator_call`: a call that the dispatcher tells of; `kernel_call`: what an operator of the user's does inside.
* `function_call`: what a call of an `autograd.Function` does inside.
* `kept_by_program`: what the program itself keeps of a call, which no plan frees.

The rules are in `ds_adacc/record/__init__.py`.
"""
