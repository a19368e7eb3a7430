#include "fibers.h"

#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace gpu_on_cpu {

thread_local dim3 blockIdx, gridDim;

namespace {

// Excludes the code that switches fibers from ThreadSanitizer, to which it would belong to all of them at once.
#define UNSEEN __attribute__((no_sanitize_thread))

constexpr size_t kStackBytes = 256 << 10;

enum class State { kReady, kPaused, kAtBarrier, kDone };

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "gpu_on_cpu: %s\n", why);
  std::abort();
}

// A context that an OS thread can switch to; ThreadSanitizer is notified of switches.
struct Context {
  ucontext_t registers;
#if defined(__SANITIZE_THREAD__)
  void* tsan = nullptr;
#endif
};

struct Fiber : Context {
  State state = State::kDone;
  void* stack;
  Fiber() {
    stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for the stack of a thread");
#if defined(__SANITIZE_THREAD__)
    tsan = __tsan_create_fiber(0);
#endif
  }
  ~Fiber() {
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(tsan);
#endif
    munmap(stack, kStackBytes);
  }
  Fiber(const Fiber&) = delete;
};

// All fibers of an OS thread, which runs one block at a time.
class Block {
 public:
  UNSEEN void run(unsigned threads, const std::function<void()>& kernel) {
    while (fibers_.size() < threads) fibers_.push_back(std::make_unique<Fiber>());
    kernel_ = &kernel;
    threads_ = live_ = threads;
    arrived_ = 0;
    all_yes_ = true;
    for (unsigned index = 0; index < threads; ++index) start(*fibers_[index]);
    release();
    while (live_ > 0) run_all_once();
    acquire();
  }

  UNSEEN bool synchronize(bool yes) {
    release();
    all_yes_ &= yes;
    if (++arrived_ == threads_) {
      verdict_ = all_yes_;
      all_yes_ = true;
      arrived_ = 0;
      for (unsigned index = 0; index < threads_; ++index) fibers_[index]->state = State::kReady;
    } else {
      yield(State::kAtBarrier);
    }
    acquire();
    return verdict_;
  }

  UNSEEN void yield(State state) {
    Fiber& fiber = *running_;
    fiber.state = state;
    switch_to(fiber, host_);
  }

  UNSEEN unsigned index() const { return index_; }

 private:
  UNSEEN void start(Fiber& fiber) {
    getcontext(&fiber.registers);
    fiber.registers.uc_stack.ss_sp = fiber.stack;
    fiber.registers.uc_stack.ss_size = kStackBytes;
    fiber.registers.uc_link = nullptr;
    makecontext(&fiber.registers, &Block::main_of_fiber, 0);
    fiber.state = State::kReady;
  }

  UNSEEN void run_all_once() {
    bool ready = false, moved = false;
    backwards_ = !backwards_;  // no kernel may rely on an order
    for (unsigned turn = 0; turn < threads_; ++turn) {
      const unsigned index = backwards_ ? threads_ - 1 - turn : turn;
      Fiber& fiber = *fibers_[index];
      if (fiber.state != State::kReady && fiber.state != State::kPaused) continue;
      ready = true;
      index_ = index;
      running_ = &fiber;
      switch_to(host_, fiber);
      moved |= fiber.state != State::kPaused;
    }
    if (!ready) fail("some threads of a block have ended, and the others wait for them at a barrier");
    if (!moved) {
      const timespec rest{0, 20'000};
      nanosleep(&rest, nullptr);
    }
  }

  UNSEEN static void main_of_fiber();

  UNSEEN void switch_to(Context& from, Context& to) {
#if defined(__SANITIZE_THREAD__)
    if (!host_.tsan) host_.tsan = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
    swapcontext(&from.registers, &to.registers);
  }

  // The host's variables and the block's barrier order what fibers do.
  void release() {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(&order_);
#endif
  }
  void acquire() {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(&order_);
#endif
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* running_ = nullptr;
  unsigned index_ = 0;  // of the fiber that runs
  Context host_;
  const std::function<void()>* kernel_ = nullptr;
  unsigned threads_ = 0, live_ = 0, arrived_ = 0;
  bool all_yes_ = true, verdict_ = true, backwards_ = true;
  char order_ = 0;
};

thread_local Block block;

void Block::main_of_fiber() {
  block.acquire();
  (*block.kernel_)();
  block.release();
  --block.live_;
  block.yield(State::kDone);
}

}  // namespace

void run_grid(dim3 grid, dim3 threads, const std::function<void()>& kernel) {
  gridDim = grid;
  for (unsigned index = 0; index < grid.x; ++index) {
    blockIdx.x = index;
    block.run(threads.x, kernel);
  }
}

dim3 thread_index() { return block.index(); }

bool synchronize(bool yes) { return block.synchronize(yes); }

void pause() { block.yield(State::kPaused); }

}  // namespace gpu_on_cpu
