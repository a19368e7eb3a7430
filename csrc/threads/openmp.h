// Tasks on the threads of the OpenMP runtime that the process has loaded, such as torch's. An engine that pins these
// threads to cores, as vLLM does, wants no others: a thread that its main thread creates would inherit that one's core.
#pragma once

#include <cstdint>

#include "threads/thread_pool.h"

namespace fused_tp {

// Lets parallel_for use OpenMP's threads from now on. Returns false if the process has loaded no OpenMP runtime with
// GNU's interface (libgomp, libomp and libiomp5 have it).
bool use_openmp_threads(bool value);

// Runs the tasks of parallel_for on OpenMP's threads. Returns false, and runs none, if these are not to be used.
bool run_openmp_tasks(int64_t tasks, int threads, const TaskRef& function);

}  // namespace fused_tp
