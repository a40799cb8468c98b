"""Observes running steps, and compares what it observes with the plan.

The input is the calls of the observed steps. The output is findings and verdicts. Nothing here changes a plan; the step
controller of `steps/` acts on the findings and verdicts.

* `observer`: counts calls and bytes alive in one step, and notes the order in which the blocks run;
* `step_profiler`: measures peak bytes and seconds of each call, in the step that measures a new plan;
* `device_memory`: what a step has taken of a CUDA device;
* `calibration`: compares both with the plan, and computes the error of the plan's memory model;
* `outlier_tracker`: finds outlier channels in a tracking step;
* `rectifier`: judges whether the outlier channels have drifted from those in the plan (paper, section 3.4).
"""
