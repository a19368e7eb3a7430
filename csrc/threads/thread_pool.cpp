#include "threads/thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "threads/openmp.h"

namespace fused_tp {
namespace {

class Pool {
 public:
  Pool() : process_(getpid()) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // A forked child has a copy of the pool without its threads, maybe with a locked mutex: the child cannot use it.
  bool belongs_to_this_process() const { return process_ == getpid(); }

  void run(int64_t tasks, int threads, TaskRef function) {
    try {
      while (static_cast<int>(threads_.size()) < threads - 1) {
        const int worker = static_cast<int>(threads_.size()) + 1;
        threads_.emplace_back([this, worker] { run_worker(worker); });
      }
    } catch (const std::system_error&) {  // RLIMIT_NPROC: continue with fewer threads, which compute the same bits
      threads = static_cast<int>(threads_.size()) + 1;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      function_ = &function;
      tasks_ = tasks;
      next_task_.store(0, std::memory_order_relaxed);
      active_workers_ = threads - 1;
      busy_workers_ = threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    take_tasks(function, tasks, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    all_idle_.wait(lock, [this] { return busy_workers_ == 0; });
  }

 private:
  void run_worker(int worker) {
    uint64_t seen_generation = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return is_stopping_ || (generation_ != seen_generation && worker <= active_workers_); });
      if (is_stopping_) return;
      seen_generation = generation_;
      const TaskRef function = *function_;
      const int64_t tasks = tasks_;
      lock.unlock();
      take_tasks(function, tasks, worker);
      lock.lock();
      if (--busy_workers_ == 0) all_idle_.notify_one();
    }
  }

  void take_tasks(const TaskRef& function, int64_t tasks, int worker) {
    for (int64_t task; (task = next_task_.fetch_add(1, std::memory_order_relaxed)) < tasks;) function(task, worker);
  }

  const pid_t process_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, all_idle_;
  std::atomic<int64_t> next_task_{0};
  const TaskRef* function_ = nullptr;
  int64_t tasks_ = 0;
  uint64_t generation_ = 0;
  int active_workers_ = 0;
  int busy_workers_ = 0;
  bool is_stopping_ = false;
};

// Leaks a pool that was inherited by a fork: its threads do not exist in this process, so they cannot be joined.
struct DeleteUnlessForked {
  void operator()(Pool* pool) const {
    if (pool->belongs_to_this_process()) delete pool;
  }
};

}  // namespace

void run_tasks(int64_t tasks, int threads, TaskRef function) {
  if (run_openmp_tasks(tasks, threads, function)) return;
  thread_local std::unique_ptr<Pool, DeleteUnlessForked> pool;
  if (pool == nullptr || !pool->belongs_to_this_process()) pool.reset(new Pool);
  pool->run(tasks, tasks < threads ? static_cast<int>(tasks) : threads, function);
}

}  // namespace fused_tp
