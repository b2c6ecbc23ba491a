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
#include "conflicts.h"
#include "locks.h"
#include "problem.h"
#include "team.h"

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
      case Scheme::serial: return serial();
      case Scheme::hogwild: return hogwild();
      case Scheme::atomic: return atomic();
      case Scheme::locked: return locked();
      case Scheme::round_robin: return round_robin();
      case Scheme::average: return average();
      case Scheme::cyclades: return settings_.threads == 1 ? serial() : cyclades();
    }
  }

 private:
  using Scratch = typename P::Scratch;
  static constexpr int64_t start_ahead = 24, item_ahead = 12, parameters_ahead = 4;
  static constexpr int64_t smallest_batch = 256, largest_batch = 1 << 12;  // of updates, where cyclades chooses

  void pretend_to_compute() const {
    if (settings_.delay <= 0) return;
    const auto start = Clock::now();
    while (seconds_since(start) < settings_.delay) {
    }
  }

  template <class Access>
  void update(const P& problem, Access& access, uint32_t item, Scratch& scratch) const {
    auto&& gradient = problem.compute(access, item, scratch);
    pretend_to_compute();
    problem.apply(access, item, gradient, scratch);
  }

  void prefetch(const P& problem, const uint32_t* order, int64_t i, int64_t end) const {
    if (i + start_ahead < end) problem.prefetch_start(order[i + start_ahead]);
    if (i + item_ahead < end) problem.prefetch_item(order[i + item_ahead]);
    if (i + parameters_ahead < end) problem.prefetch_parameters(order[i + parameters_ahead]);
  }

  // Looks ahead of the range, up to ``last``.
  template <class Access>
  void update_range(const P& problem, Access& access, const uint32_t* order, int64_t start, int64_t end, int64_t last,
                    Scratch& scratch) const {
    for (int64_t i = start; i < end; ++i) {
      prefetch(problem, order, i, last);
      update(problem, access, order[i], scratch);
    }
  }

  void serial() {
    Plain access;
    Scratch scratch = problem_.scratch();
    Asking asking(settings_.interrupted, settings_.context);
    int64_t next = settings_.start;
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
        update(problem_, access, settings_.order[i], scratch);
        locks.release(held);
      }
    });
  }

  // Gradients are computed at any time, and applied in turn (Langford et al., 2009).
  void round_robin() {
    alignas(64) std::atomic<int64_t> turn{settings_.start};
    alignas(64) std::atomic<int64_t> limit{settings_.end};
    std::vector<Scratch> scratches(settings_.threads, problem_.scratch());
    run_team(settings_.threads, [&](int thread) {
      Asking asking(thread == 0 ? settings_.interrupted : nullptr, settings_.context);
      Racy access;
      Scratch& scratch = scratches[thread];
      for (int64_t i = settings_.start + thread, made = 0; i < limit.load(std::memory_order_relaxed);
           i += settings_.threads, ++made) {
        // Nobody has applied an update after this thread's next, so all can end here.
        if (made % chunk_ == 0 && asking.must_stop()) limit.store(i, std::memory_order_relaxed);
        prefetch(problem_, settings_.order, i, settings_.end);
        auto&& gradient = problem_.compute(access, settings_.order[i], scratch);
        pretend_to_compute();
        for (Patience patience; turn.load(std::memory_order_acquire) != i; patience.wait())
          if (i >= limit.load(std::memory_order_relaxed)) return;
        if (i >= limit.load(std::memory_order_relaxed)) return;
        problem_.apply(access, settings_.order[i], gradient, scratch);
        turn.store(i + 1, std::memory_order_release);
      }
    });
    outcome_.updates = turn.load() - settings_.start;
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

  // As many batches as there are threads are divided at the same time, one by each; then they run, one after the other.
  void cyclades() {
    const int threads = settings_.threads;
    const int64_t wanted = std::min(settings_.batch, Conflicts::largest_batch);
    const int64_t most = wanted > 0 ? wanted : largest_batch;
    std::vector<Conflicts> conflicts;
    for (int thread = 0; thread < threads; ++thread) conflicts.emplace_back(problem_.coordinates(), most, threads);
    std::vector<Parcels> parcels(threads);
    for (Parcels& of_batch : parcels) {
      of_batch.of_thread.resize(threads);
      for (auto& parcel : of_batch.of_thread) parcel.reserve(most);
    }
    std::vector<Scratch> scratches(threads, problem_.scratch());
    Barrier barrier(threads);
    // The calling thread writes these between two barriers, when nobody reads them.
    bool stop = false;
    int64_t done = settings_.start, batch = wanted > 0 ? wanted : 1024;
    run_team(threads, [&](int thread) {
      Asking asking(thread == 0 ? settings_.interrupted : nullptr, settings_.context);
      Plain access;
      while (done < settings_.end && !stop) {
        // The calling thread changes these after the last batch, while others may still be at the loop over batches.
        const int64_t group = done, size = batch;
        const auto batches = static_cast<int>(std::min<int64_t>(threads, divided(settings_.end - group, size)));
        const auto begun = Clock::now();
        const int64_t own = group + thread * size;
        if (thread < batches)
          conflicts[thread].divide(problem_, settings_.order + own, std::min(size, settings_.end - own), parcels[thread]);
        barrier.wait();
        if (thread == 0) outcome_.preparation_seconds += seconds_since(begun);
        for (int k = 0; k < batches; ++k) {
          const auto& items = parcels[k].of_thread[thread];
          const auto count = static_cast<int64_t>(items.size());
          update_range(problem_, access, items.data(), 0, count, count, scratches[thread]);
          barrier.wait();
        }
        if (thread == 0) {
          int64_t largest = 0;
          for (int k = 0; k < batches; ++k) {
            note(parcels[k]);
            largest = std::max(largest, parcels[k].largest);
          }
          done = std::min(settings_.end, group + batches * size);
          if (wanted == 0) batch = next_batch(size, largest);
          stop = asking.must_stop();
        }
        barrier.wait();
      }
    });
    outcome_.updates = done - settings_.start;
  }

  // Larger while every component is small against a thread's share, smaller when one is not; a size that was too large
  // is not tried again.
  int64_t next_batch(int64_t batch, int64_t largest) {
    const int64_t share = batch / settings_.threads;
    if (largest * 2 > share) return too_large_ = batch, std::max(smallest_batch, batch / 2);
    return largest * 32 < share && 2 * batch < too_large_ ? 2 * batch : batch;
  }

  void note(const Parcels& parcels) {
    ++outcome_.batches;
    outcome_.components += parcels.components;
    outcome_.largest_component = std::max(outcome_.largest_component, parcels.largest);
  }

  const P& problem_;
  const Settings& settings_;
  Outcome& outcome_;
  int64_t chunk_ = 256;
  int64_t too_large_ = largest_batch + 1;
};

}  // namespace paceline::sparse
