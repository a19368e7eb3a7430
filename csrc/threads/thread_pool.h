// parallel_for: tasks on a pool of threads. Every calling thread has a pool of its own, so callers never wait for each
// other.
#pragma once

#include <cstdint>

namespace fused_tp {

// Reference to a function (task, worker), where 0 <= worker < number of threads. Unlike std::function it never
// allocates.
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

// Implementation of parallel_for for more than one thread and more than one task.
void run_tasks(int64_t tasks, int threads, TaskRef function);

// Calls function(task, worker) for every task on up to `threads` threads, one of which is the caller. Tasks begin in
// ascending order, so a task may wait for an earlier one. The threads sleep between calls and exit with the calling
// thread. A forked child creates new threads.
template <typename F>
void parallel_for(int64_t tasks, int threads, F&& function) {
  if (threads <= 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) function(task, 0);
  } else {
    run_tasks(tasks, threads, TaskRef(function));
  }
}

}  // namespace fused_tp
