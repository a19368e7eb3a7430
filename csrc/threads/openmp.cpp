#include "threads/openmp.h"

#include <dlfcn.h>

#include <atomic>

namespace fused_tp {
namespace {

using Parallel = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);
using ThreadNumber = int (*)();

std::atomic<Parallel> parallel{nullptr};
ThreadNumber thread_number = nullptr;

struct Tasks {
  const TaskRef& function;
  const int64_t count;
  std::atomic<int64_t> next{0};

  static void take(void* object) {
    auto& tasks = *static_cast<Tasks*>(object);
    const int worker = thread_number();
    for (int64_t task; (task = tasks.next.fetch_add(1, std::memory_order_relaxed)) < tasks.count;)
      tasks.function(task, worker);
  }
};

}  // namespace

bool use_openmp_threads(bool value) {
  Parallel found = nullptr;
  if (value) {
    found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    thread_number = reinterpret_cast<ThreadNumber>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    if (thread_number == nullptr) found = nullptr;
  }
  parallel.store(found, std::memory_order_release);  // after thread_number, which the tasks call
  return found != nullptr;
}

bool run_openmp_tasks(int64_t tasks, int threads, const TaskRef& function) {
  const Parallel run = parallel.load(std::memory_order_acquire);
  if (run == nullptr) return false;
  Tasks shared{function, tasks};
  run(Tasks::take, &shared, static_cast<unsigned>(tasks < threads ? tasks : threads), 0);
  return true;
}

}  // namespace fused_tp
