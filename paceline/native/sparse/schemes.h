// The schemes, over any problem that can compute and apply one update.
//
// A problem P has: items(), coordinates(), prefetch_start(item), prefetch_item(item), prefetch_parameters(item),
// for_coordinates(item, f) over what an update writes, P::Gradient, P::Scratch, bind(parameters, rate, epoch),
// compute(access, item, scratch), apply(access, item, gradient, scratch), settle() and the copies of `average`.
#pragma once
#include <algorithm>
#include <mutex>
#include <vector>

#include "access.h"
#include "cyclades.h"
#include "locks.h"
#include "problem.h"
#include "team.h"
#include "updates.h"

namespace paceline::sparse {

template <class P>
class Schemes {
 public:
  Schemes(const P& problem, const Settings& settings, Outcome& outcome)
      : problem_(problem), settings_(settings), outcome_(outcome) {
    if (settings.delay > 0) chunk_ = 16;
    else if (settings.end - settings.start >= 64 * 1024 * settings.threads) chunk_ = 1024;
  }

  void run() {
    switch (settings_.scheme) {
      case Scheme::serial: return serial(settings_.start);
      case Scheme::hogwild: return hogwild();
      case Scheme::atomic: return atomic();
      case Scheme::locked: return locked();
      case Scheme::round_robin: return round_robin();
      case Scheme::average: return average();
      case Scheme::cyclades: return settings_.threads == 1 ? serial(settings_.start) : cyclades();
    }
  }

 private:
  using Scratch = typename P::Scratch;

  // Looks ahead of the range, up to ``last``.
  template <class Access>
  void update_range(const P& problem, Access& access, const uint32_t* order, int64_t start, int64_t end, int64_t last,
                    Scratch& scratch) const {
    for (int64_t i = start; i < end; ++i) {
      prefetch(problem, order, i, last);
      update(problem, access, order[i], scratch, settings_.delay);
    }
  }

  void serial(int64_t next) {
    Plain access;
    Scratch scratch = problem_.scratch();
    Asking asking(settings_.interrupted, settings_.context);
    while (next < settings_.end && !asking.must_stop()) {
      const int64_t end = std::min(settings_.end, next + chunk_);
      update_range(problem_, access, settings_.order, next, end, settings_.end, scratch);
      next = end;
    }
    outcome_.updates = next - settings_.start;
  }

  // Threads take chunks of the order until none is left. The calling thread looks for interrupts.
  template <class Work>
  void in_chunks(Work&& work) {
    alignas(64) std::atomic<int64_t> next{settings_.start};
    std::atomic<bool> stop{false};
    std::vector<Scratch> scratches(settings_.threads, problem_.scratch());
    run_team(settings_.threads, [&](int thread) {
      Asking asking(thread == 0 ? settings_.interrupted : nullptr, settings_.context);
      while (!stop.load(std::memory_order_relaxed)) {
        const int64_t start = next.fetch_add(chunk_, std::memory_order_relaxed);
        if (start >= settings_.end) break;
        approach(problem_, settings_.order, start, std::min(settings_.end, start + chunk_));
        work(thread, start, std::min(settings_.end, start + chunk_), scratches[thread]);
        if (asking.must_stop()) stop.store(true, std::memory_order_relaxed);
      }
    });
    outcome_.updates = std::min(next.load(), settings_.end) - settings_.start;
  }

  void hogwild() {
    std::vector<Watching> watching(settings_.threads);
    in_chunks([&](int thread, int64_t start, int64_t end, Scratch& scratch) {
      Watching watched;  // counts on this thread's own stack
      Racy access;
      for (int64_t i = start; i < end;) {
        const int64_t next = next_watched(i);
        update_range(problem_, access, settings_.order, i, std::min(next, end), end, scratch);
        if (next < end) update_range(problem_, watched, settings_.order, next, next + 1, end, scratch);
        i = std::min(next, end) + 1;
      }
      watching[thread].sampled += watched.sampled;
      watching[thread].lost += watched.lost;
      watching[thread].overwritten += watched.overwritten;
    });
    for (const Watching& of_thread : watching) {
      outcome_.sampled += of_thread.sampled;
      outcome_.lost += of_thread.lost;
      outcome_.overwritten += of_thread.overwritten;
    }
    problem_.settle();
  }

  int64_t next_watched(int64_t i) const {
    return settings_.watch > 0 ? (i + settings_.watch - 1) / settings_.watch * settings_.watch : settings_.end;
  }

  void atomic() {
    in_chunks([&](int, int64_t start, int64_t end, Scratch& scratch) {
      Swapping access;
      update_range(problem_, access, settings_.order, start, end, end, scratch);
    });
    problem_.settle();
  }

  void locked() {
    Locks locks(problem_.coordinates());
    std::vector<std::vector<uint32_t>> wanted(settings_.threads);
    for (auto& of_thread : wanted) of_thread.reserve(problem_.most_coordinates());
    in_chunks([&](int thread, int64_t start, int64_t end, Scratch& scratch) {
      Plain access;
      auto& held = wanted[thread];
      for (int64_t i = start; i < end; ++i) {
        prefetch(problem_, settings_.order, i, end);
        if (i + parameters_ahead < end)
          problem_.for_coordinates(settings_.order[i + parameters_ahead], [&](int64_t u) { locks.prefetch(u); });
        held.clear();
        problem_.for_coordinates(settings_.order[i], [&](int64_t u) { held.push_back(locks.lock_of(u)); });
        locks.take(held);
        update(problem_, access, settings_.order[i], scratch, settings_.delay);
        locks.release(held);
      }
    });
  }

  // Gradients are computed at any time, and applied in turn (Langford et al., 2009).
  void round_robin() {
    alignas(64) std::atomic<int64_t> turn{settings_.start};
    int64_t end = settings_.end;
    std::vector<Scratch> scratches(settings_.threads, problem_.scratch());
    run_team(settings_.threads, [&](int thread) {
      Asking asking(thread == 0 ? settings_.interrupted : nullptr, settings_.context);
      Racy access;
      Scratch& scratch = scratches[thread];
      bool stop = false;
      for (int64_t i = settings_.start + thread, made = 0; i < settings_.end; i += settings_.threads, ++made) {
        if (made % chunk_ == 0) stop = asking.must_stop();
        prefetch(problem_, settings_.order, i, settings_.end);
        auto&& gradient = problem_.compute(access, settings_.order[i], scratch);
        pretend_to_compute(settings_.delay);
        await_count(turn, i);
        if (turn.load(std::memory_order_relaxed) > i) return;  // the first thread has ended the run
        if (stop) {
          end = i;
          return set_count(turn, settings_.end + settings_.threads);
        }
        problem_.apply(access, settings_.order[i], gradient, scratch);
        set_count(turn, i + 1);
      }
    });
    outcome_.updates = end - settings_.start;
    problem_.settle();
  }

  // Each thread has its own parameters; they are averaged when the run ends (Zinkevich et al., 2010). The chunks are so
  // small that all threads make as many; with fewer updates than threads, some have none, and no copy.
  void average() {
    const int64_t updates = settings_.end - settings_.start;
    if (updates == 0) return;
    const int64_t rounds = divided(updates, settings_.threads * chunk_);
    const int64_t chunk = divided(updates, settings_.threads * rounds);
    const auto threads = static_cast<int>(std::min<int64_t>(settings_.threads, divided(updates, chunk)));
    std::vector<typename P::Copy> copies;
    std::vector<P> problems(threads, problem_);
    for (int thread = 0; thread < threads; ++thread) {
      copies.push_back(problem_.copy());
      problems[thread].use(copies.back());
    }
    std::vector<Scratch> scratches(threads, problem_.scratch());
    // All threads make the same number of chunks: the one that is furthest when the run is to stop decides.
    std::mutex mutex;
    int64_t furthest = -1;
    bool stop = false;
    run_team(threads, [&](int thread) {
      Asking asking(thread == 0 ? settings_.interrupted : nullptr, settings_.context);
      Plain access;
      for (int64_t round = 0;; ++round) {
        const int64_t start = settings_.start + (round * threads + thread) * chunk;
        const bool must_stop = asking.must_stop();
        {
          const std::lock_guard guard(mutex);
          stop = stop || must_stop;
          if (stop && round > furthest) return;
          if (start >= settings_.end) return;
          furthest = std::max(furthest, round);
        }
        const int64_t end = std::min(settings_.end, start + chunk);
        update_range(problems[thread], access, settings_.order, start, end, end, scratches[thread]);
      }
    });
    outcome_.updates = std::min(updates, (furthest + 1) * threads * chunk);
    problem_.average(copies);
  }

  static int64_t divided(int64_t items, int64_t parts) { return (items + parts - 1) / parts; }

  void cyclades() {
    Cyclades<P> run(problem_, settings_);
    run.run();
    if (run.is_dense()) serial(run.done());
    else outcome_.updates = run.done() - settings_.start;
    outcome_.rounds = run.rounds();
    outcome_.waited = run.waited();
  }

  const P& problem_;
  const Settings& settings_;
  Outcome& outcome_;
  int64_t chunk_ = 256;
};

}  // namespace paceline::sparse
