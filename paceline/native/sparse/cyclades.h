// Updates side by side with the bits of serial: those that share a coordinate are made in their order (Pan et al., 2016).
//
// A round is a part of the order. Each thread has a chunk of it, the first thread the first one. While a thread makes its
// updates it marks the coordinates of its chunk of the next round. An update that has a coordinate of an earlier chunk of
// its round, or of an update of its own chunk that waits, waits until the earlier chunks are made.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "access.h"
#include "marks.h"
#include "problem.h"
#include "team.h"
#include "updates.h"

namespace paceline::sparse {

template <class P>
class Cyclades {
 public:
  Cyclades(const P& problem, const Settings& settings)
      : problem_(problem),
        settings_(settings),
        lanes_(settings.threads),
        fixed_(settings.batch > 0 || settings.delay > 0),
        size_(settings.batch > 0 ? (settings.batch + settings.threads - 1) / settings.threads : fixed_ ? smallest : first),
        planned_(settings.start),
        done_(settings.start) {
    for (int64_t round = 0; round < ahead; ++round) plan(round);
    for (Lane& lane : lanes_) lane.scratch.push_back(problem.scratch());
  }

  void run() {
    const int last = settings_.threads - 1;
    run_team(settings_.threads, [=, this](int thread) {
      if (thread == 0) work<true, false>(thread);
      else if (thread < last) work<true, true>(thread);
      else work<false, true>(thread);
    });
  }

  int64_t done() const { return done_; }      // the end of what was made of the order
  bool is_dense() const { return is_dense_; }  // it ended since nearly all updates wait
  int64_t rounds() const { return rounds_; }
  int64_t waited() const { return waited_; }

 private:
  static constexpr int64_t ahead = 3;  // rounds that are planned beyond the one that was made
  static constexpr int64_t smallest = 16, first = 64, largest = 2048;  // updates of a thread in a round
  static constexpr int64_t waiting = 8;  // of them, that is best

  struct Round {
    int64_t start = 0, first = 0, size = 0;  // of the order; updates of the first thread; of each other
  };

  // What one thread has for itself; others read its marks when it has made the round before.
  struct alignas(64) Lane {
    std::atomic<int64_t> rounds{-1};  // that it has made
    Marks marks[2];                   // of its chunks of even and of odd rounds
    Marks before;                     // of the chunks before its own, and of its updates that wait
    std::vector<uint32_t> items;      // of this round, the next, and the first of the one after
    std::vector<uint32_t> waiting;
    std::vector<typename P::Scratch> scratch;
  };

  // The last thread does it when all have made their part of a round.
  void plan(int64_t round) {
    const int64_t left = settings_.end - planned_, threads = settings_.threads;
    const bool stop = is_dense_ || stopping_.load(std::memory_order_relaxed);
    const int64_t size = stop ? 0 : std::min(size_, (left + threads - 1) / threads);
    const int64_t more = fixed_ || size < size_ ? 0 : size * more_ / 128;
    plans_[round % (ahead + 1)] = {planned_, size + more, size};
    planned_ = start(round, settings_.threads);
  }

  const Round& planned(int64_t round) const { return plans_[round % (ahead + 1)]; }
  int64_t start(int64_t round, int thread) const {
    const Round& plan = planned(round);
    return std::min(settings_.end, plan.start + (thread > 0 ? plan.first + (thread - 1) * plan.size : 0));
  }
  int64_t count(int64_t round, int thread) const { return start(round, thread + 1) - start(round, thread); }

  void append(std::vector<uint32_t>& items, int64_t round, int thread, int64_t most) const {
    const uint32_t* const from = settings_.order + start(round, thread);
    items.insert(items.end(), from, from + std::min(most, count(round, thread)));
  }

  // The first thread tests no coordinates, the last one marks none. In the round before the first, coordinates are marked
  // and nothing is made.
  template <bool marks, bool tests>
  void work(int thread) {
    Lane& lane = lanes_[thread];
    Asking asking(thread == 0 ? settings_.interrupted : nullptr, settings_.context);
    for (int64_t round = -1; round < 0 || planned(round).size > 0; ++round) {
      const int64_t now = round < 0 ? 0 : count(round, thread), next = count(round + 1, thread);
      lane.items.clear();
      if (now > 0) append(lane.items, round, thread, now);
      append(lane.items, round + 1, thread, next);
      append(lane.items, round + 2, thread, start_ahead);
      if (marks) lane.marks[(round + 1) & 1].clear();
      if (tests && now > 0) {
        lane.before = lanes_[0].marks[round & 1];
        for (int earlier = 1; earlier < thread; ++earlier) lane.before.add_all(lanes_[earlier].marks[round & 1]);
      }
      make<marks, tests>(lane, now, next, lane.marks[(round + 1) & 1]);
      if (tests) make_waiting(thread, round);
      if (thread == 0 && asking.must_stop()) stopping_.store(true, std::memory_order_relaxed);
      if (!marks && round >= 0) end_round(round);
      set_count(lane.rounds, round + 1);
      if (marks) await_count(lanes_.back().rounds, round + 1);
    }
  }

  // Rows of the next round come near when they are marked, so only parameters are still to be fetched before an update.
  template <bool marks, bool tests>
  void make(Lane& lane, int64_t now, int64_t next, Marks& marked) {
    Plain access;
    const uint32_t* const items = lane.items.data();
    const auto end = static_cast<int64_t>(lane.items.size());
    for (int64_t i = 0; i < (marks ? std::max(now, next) : now); ++i) {
      if (marks) {
        if (now + i + start_ahead < end) problem_.prefetch_start(items[now + i + start_ahead]);
        if (now + i + item_ahead < end) problem_.prefetch_item(items[now + i + item_ahead]);
        if (i < next) problem_.for_coordinates(items[now + i], [&](int64_t u) { marked.add(u); });
        if (i >= now) continue;
        if (i + parameters_ahead < end) problem_.prefetch_parameters(items[i + parameters_ahead]);
      } else {
        prefetch(problem_, items, i, end);
      }
      if (tests && must_wait(lane.before, items[i])) {
        problem_.for_coordinates(items[i], [&](int64_t u) { lane.before.add(u); });
        lane.waiting.push_back(items[i]);
      } else {
        update(problem_, access, items[i], lane.scratch[0], settings_.delay);
      }
    }
  }

  bool must_wait(const Marks& before, uint32_t item) const {
    bool found = false;
    problem_.for_coordinates(item, [&](int64_t u) { found |= before.has(u); });
    return found;
  }

  void make_waiting(int thread, int64_t round) {
    Lane& lane = lanes_[thread];
    const bool is_late = lanes_[thread - 1].rounds.load(std::memory_order_relaxed) <= round;
    await_count(lanes_[thread - 1].rounds, round + 1);
    Plain access;
    for (const uint32_t item : lane.waiting) update(problem_, access, item, lane.scratch[0], settings_.delay);
    seen_waiting_ += static_cast<int64_t>(lane.waiting.size());
    lane.waiting.clear();
    // The first thread has the more to do the less the last one waits for the others.
    if (thread + 1 == settings_.threads) more_ = std::clamp<int64_t>(more_ + (is_late ? -1 : 1), -64, 64);
  }

  // A longer round has more updates that wait; in a shorter one threads wait for each other more often.
  void end_round(int64_t round) {
    ++rounds_;
    done_ = start(round, settings_.threads);
    waited_ += seen_waiting_ - seen_before_;
    if (planned(round).size != size_) seen_waiting_ = seen_ = 0;  // planned before the size was changed
    else if (!fixed_ && ++seen_ == 8) {
      const int64_t each = seen_waiting_ / (8 * (settings_.threads - 1));
      is_dense_ = size_ == smallest && each > smallest / 2;
      if (each > 2 * waiting) size_ = std::max(smallest, size_ / 2);
      else if (each < waiting / 2) size_ = std::min(largest, size_ * 2);
      seen_waiting_ = seen_ = 0;
    }
    seen_before_ = seen_waiting_;
    plan(round + ahead);
  }

  const P& problem_;
  const Settings& settings_;
  std::vector<Lane> lanes_;
  Round plans_[ahead + 1];
  std::atomic<bool> stopping_{false};
  bool is_dense_ = false;
  const bool fixed_;  // the size of a round
  int64_t size_, planned_, done_;
  int64_t more_ = 0;  // of the first thread's updates, in 128ths of the others'
  int64_t rounds_ = 0, waited_ = 0;
  int64_t seen_ = 0, seen_waiting_ = 0, seen_before_ = 0;  // rounds of this size, and what waited in them
};

}  // namespace paceline::sparse
