// Threads that sleep until there is work, one set per calling thread.
#pragma once

#include <cstdint>

namespace fused_tp {

// A function that is called with (task, worker); the worker is below the number of threads.
class TaskRef {
 public:
  template <typename F>
  explicit TaskRef(F& function)
      : object_(&function),
        call_([](void* object, int64_t task, int worker) { (*static_cast<F*>(object))(task, worker); }) {}
  void operator()(int64_t task, int worker) const { call_(object_, task, worker); }

 private:
  void* object_;
  void (*call_)(void*, int64_t, int);
};

void run_tasks(int64_t tasks, int threads, TaskRef function);

// Calls function(task, worker) for every task, on up to `threads` threads, including the caller. Tasks begin in
// ascending order, so one may wait for an earlier one. The threads stay, asleep, until the calling thread ends; a
// forked child creates new ones.
template <typename F>
void parallel_for(int64_t tasks, int threads, F&& function) {
  if (threads <= 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) function(task, 0);
  } else {
    run_tasks(tasks, threads, TaskRef(function));
  }
}

}  // namespace fused_tp
