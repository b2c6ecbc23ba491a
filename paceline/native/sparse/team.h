// Threads of one run: the caller is the first of them, and the others end with the run.
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace paceline::sparse {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Whether threads can run side by side here.
inline bool several_cores() {
  static const bool several = [] {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) != 0 || CPU_COUNT(&cores) > 1;
  }();
  return several;
}

// Lets the processor rest for a moment.
inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Waits for a lock. It spins for longer than a short sleep takes: where other programs compete for the cores, the thread
// that sleeps is back while the other still spins, and both go on side by side. A yield would cost a whole slice of time.
// On one core it lets the others run.
class Patience {
 public:
  void wait() {
    if (!several_cores()) sched_yield();
    else if (++spins_ < 8192) pause();
    else std::this_thread::sleep_for(std::chrono::microseconds(10));
  }

 private:
  int spins_ = 0;
};

// Waits until another thread has set a count that is large enough. After a while it sleeps, and is woken by ``set_count``:
// the thread that it waits for may need this core.
inline void await_count(const std::atomic<int64_t>& count, int64_t least) {
  const int spins = several_cores() ? 2048 : 0;
  for (int spin = 0; spin < spins; ++spin) {
    if (count.load(std::memory_order_acquire) >= least) return;
    pause();
  }
  for (int64_t seen; (seen = count.load(std::memory_order_acquire)) < least;) count.wait(seen, std::memory_order_acquire);
}

inline void set_count(std::atomic<int64_t>& count, int64_t value) {
  count.store(value, std::memory_order_release);
  count.notify_all();
}

// Runs work(0) here and work(1), work(2), ... on threads of their own. The work must not throw. If a thread cannot be
// made, none begins.
template <class Work>
void run_team(int threads, Work&& work) {
  enum { wait, go, give_up };
  std::atomic<int> signal{wait};
  std::vector<std::jthread> team;
  const auto begin = [&](int state) {
    signal.store(state, std::memory_order_release);
    signal.notify_all();
  };
  try {
    team.reserve(threads - 1);
    for (int thread = 1; thread < threads; ++thread)
      team.emplace_back([&, thread] {
        signal.wait(wait, std::memory_order_acquire);
        if (signal.load(std::memory_order_acquire) == go) work(thread);
      });
  } catch (...) {
    begin(give_up);
    throw;
  }
  begin(go);
  work(0);
}

// Asks now and then whether the run is to end; for the calling thread.
class Asking {
 public:
  Asking(bool (*interrupted)(void*), void* context) : interrupted_(interrupted), context_(context), last_(Clock::now()) {}

  bool must_stop() {
    if (interrupted_ == nullptr || seconds_since(last_) < 0.1) return false;
    last_ = Clock::now();
    return interrupted_(context_);
  }

 private:
  bool (*interrupted_)(void*);
  void* context_;
  Clock::time_point last_;
};

}  // namespace paceline::sparse
