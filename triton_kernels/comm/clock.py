"""Time and rest for kernels that wait; the one file to swap for another GPU maker, or to count polls instead.

Compiled, `now_ns` is the %globaltimer register, one clock for all SMs of a GPU (Triton has it as inline PTX). Under the
interpreter it is the host's monotonic clock. Threads of a program may read different times, so a kernel must not branch
on a reading of its own: `signals.clock` makes it one value for all of them.
"""

import time

import triton

if triton.knobs.runtime.interpret:

    def now_ns() -> int:
        return time.monotonic_ns()

    def pause() -> None:
        # Ranks are processes that share the cores: one that only waits must let the others run.
        time.sleep(200e-6)

else:
    from triton.language.extra.cuda import globaltimer

    @triton.jit
    def now_ns():
        return globaltimer()

    @triton.jit
    def pause():
        """Nothing: a poll is a round trip to L2, and flags usually arrive within a few of them."""
        return
