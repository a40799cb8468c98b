"""What is seen while steps run, and what it says about the plan.

In come the calls of the steps that are looked at. Out come findings and verdicts; nothing here changes a plan. The step
controller of `runtime` acts on them.

* `observer`: calls and bytes alive in one step, and in what order the blocks run;
* `step_profiler`: bytes at the peak and seconds of each call, in the step that measures a new plan;
* `calibration`: compares both with the plan, and says by how much its model is wrong;
* `outlier_tracker`: looks for outlier channels in a tracking step;
* `rectifier`: judges whether they have drifted from those planned for (paper, section 3.4).
"""
