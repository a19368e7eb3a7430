// The threads of a block as fibers of one OS thread: they meet at barriers and yield where they wait for other ranks.
//
// To ThreadSanitizer fibers are threads of their own, ordered only by barriers, launches and atomics, so it finds races
// inside of a block as well as between ranks.
#pragma once

#include <functional>

namespace gpu_on_cpu {

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x_) : x(x_) {}
};

extern thread_local dim3 blockIdx, gridDim;

// A function, since the fibers of an OS thread share its variables.
dim3 thread_index();

// Runs a kernel to its end: for all blocks in order, by all threads of each at once.
void run_grid(dim3 grid, dim3 block, const std::function<void()>& kernel);

// Barrier of the block's threads; whether all of them said yes.
bool synchronize(bool yes);

// Lets the other threads run, and the other ranks when all threads of this block do nothing but wait.
void pause();

}  // namespace gpu_on_cpu
