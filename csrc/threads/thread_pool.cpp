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
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Threads do not survive a fork, and the mutexes that they held stay locked.
  bool of_this_process() const { return process_ == getpid(); }

  void run(int64_t tasks, int threads, TaskRef function) {
    try {
      while (static_cast<int>(threads_.size()) < threads - 1) {
        const int worker = static_cast<int>(threads_.size()) + 1;
        threads_.emplace_back([this, worker] { work(worker); });
      }
    } catch (const std::system_error&) {  // RLIMIT_NPROC; fewer threads compute the same bits
      threads = static_cast<int>(threads_.size()) + 1;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      function_ = &function;
      tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      wanted_ = threads - 1;
      busy_ = threads - 1;
      ++round_;
    }
    wake_.notify_all();
    take_tasks(function, tasks, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void work(int worker) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return ending_ || (round_ != seen && worker <= wanted_); });
      if (ending_) return;
      seen = round_;
      const TaskRef function = *function_;
      const int64_t tasks = tasks_;
      lock.unlock();
      take_tasks(function, tasks, worker);
      lock.lock();
      if (--busy_ == 0) idle_.notify_one();
    }
  }

  void take_tasks(const TaskRef& function, int64_t tasks, int worker) {
    for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) function(task, worker);
  }

  const pid_t process_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::atomic<int64_t> next_{0};
  const TaskRef* function_ = nullptr;
  int64_t tasks_ = 0;
  uint64_t round_ = 0;
  int wanted_ = 0;
  int busy_ = 0;
  bool ending_ = false;
};

// A pool of another process is leaked: its threads do not exist here and cannot be joined.
struct Leave {
  void operator()(Pool* pool) const {
    if (pool->of_this_process()) delete pool;
  }
};

}  // namespace

void run_tasks(int64_t tasks, int threads, TaskRef function) {
  thread_local std::unique_ptr<Pool, Leave> pool;
  if (pool == nullptr || !pool->of_this_process()) pool.reset(new Pool);
  pool->run(tasks, tasks < threads ? static_cast<int>(tasks) : threads, function);
}

}  // namespace fused_tp
