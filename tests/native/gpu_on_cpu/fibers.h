// Runs the threads of a block as fibers of one OS thread: they synchronize at barriers and yield while they wait for
// other ranks.
//
// ThreadSanitizer treats fibers as separate threads, ordered only by barriers, launches and atomics, so it finds races
// within a block as well as between ranks.
#pragma once

#include <functional>

namespace gpu_on_cpu {

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x_) : x(x_) {}
};

extern thread_local dim3 blockIdx, gridDim;

// A function, since the fibers of an OS thread share its thread_local variables.
dim3 thread_index();

// Runs a kernel to its end: blocks in order, the threads of each block concurrently.
void run_grid(dim3 grid, dim3 block, const std::function<void()>& kernel);

// Barrier of the block's threads; returns true if `yes` was true in all of them.
bool synchronize(bool yes);

// Yields to the other threads, and to the other ranks when all threads of this block are waiting.
void pause();

}  // namespace gpu_on_cpu
