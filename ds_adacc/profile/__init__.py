"""Measure what each choice for a block costs, on the user's own hardware.

In comes a captured call of a block, its tensors still alive. Out goes a `planner.Profile`: the block as a graph of
plain numbers, the seconds of each operator's replay, and for each value the codecs on offer with their bytes, seconds
and errors.

The files, in the order in which a captured call meets them:

* `profiler`: takes the profile from the run that is resumed or from the cache; otherwise has it measured.
* `cache`: profiles on disk, by everything that a measurement depends on; `function_code`: the code among it;
  `cache_folder`: where they are.
* `measure`: the profile of a block.
* `codec_maker`: which codecs may hold a value, and the making of them; `codec_costs`: what each costs.
* `timer`: seconds of a function on a device.
* `operator_costs`: the time of a replay and of a backward step, and the bytes that each takes besides its results.
* `memory_trace`: the allocators' traffic, seen through torch's profiler.
* `block_graph`: the recording as the planner wants it; `gradient_memory`: what the gradients take
  at each step of its backward.
* `arrival`: tells when a block's gradient arrives; `probe`: then runs its backward several times.
* `gradient_error`: what is measured so; `unmeasurable`: why it may not be measured.

Rules of this room, cited by their letter and number where they are obeyed:

P1. Real tensors.
    Everything is measured on the block's own recorded tensors: their data, shapes and strides decide both time and
    error.
P2. Cold caches.
    A time is taken with a cold cache: a tensor of a real step was written long before it is read. On the CPU it is the
    least of three runs after a warm-up: other work on the machine only adds. One backward step is timed once there, as
    its time only tells how much a copy can hide behind, and nothing is copied. On a CUDA device a time is the median
    of five runs. Before each, the device sleeps until the host has enqueued the run.
P3. Training stays as it was.
    Measuring leaves training as it was: the random generators are put back, no `.grad` is written, and the captured
    graph stays usable for training's own backward. The loss curve must not depend on what was measured.
P4. No backward before its time.
    Backward is not run ahead of training's own where it may call a collective or a hook: other ranks would not take
    part, and the hook would run twice.
P5. Nothing is guessed.
    What cannot be measured is not guessed: a lossy codec without a finite gradient error is not offered.
P6. One profiler.
    A process can have one profiler. Beside one of the user's, workspaces are not seen and count as 0, so the profile
    serves this run only and is not put into the cache.
P7. Keys of the cache.
    A key of the cache holds everything that a measurement depends on, the sources of the kernels and of this room
    among it: if the way of measuring changes, profiles are measured again. What the cache returns is checked against
    the block, since data may have decided sizes and roles.
P8. The cache stops no run.
    The cache never stops a run: without a usable file, blocks are measured.
P9. Indices stay.
    Values and operators keep the indices that they have in the recording, so that a policy needs no translation.
P10. Garbage.
    While operators are measured, Python collects no garbage. The allocators do not tell whose memory is released,
    and a collection takes time.
"""
