// Groups of updates that share no coordinate with each other: connected components of a batch (Pan et al., 2016).
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "access.h"

namespace paceline::sparse {

// The updates of one batch, divided among threads: those of a component lie with one thread, in their order.
struct Parcels {
  std::vector<std::vector<uint32_t>> of_thread;
  int64_t components = 0, largest = 0;
};

class Conflicts {
 public:
  static constexpr int64_t largest_batch = 1 << 15;  // so that its stamps have 16 bits

  Conflicts(int64_t coordinates, int64_t batch, int threads)
      : last_user_(coordinates, 0), parent_(batch), cost_(batch), thread_(batch), load_(threads) {}

  template <class P>
  void divide(const P& problem, const uint32_t* order, int64_t count, Parcels& parcels) {
    connect(problem, order, count);
    assign(count, parcels);
    for (auto& parcel : parcels.of_thread) parcel.clear();
    for (int64_t i = 0; i < count; ++i) parcels.of_thread[thread_[parent_[i]]].push_back(order[i]);
  }

 private:
  // Joins each update to the last one that has the same coordinate. Stamps of earlier batches are below those of this
  // one, so the table is cleared only when the numbers run out.
  template <class P>
  void connect(const P& problem, const uint32_t* order, int64_t count) {
    constexpr int64_t ahead = 12, table_ahead = 4;
    if (stamp_ + count > UINT16_MAX) {
      std::fill(last_user_.begin(), last_user_.end(), 0);
      stamp_ = 1;
    }
    const int64_t first = stamp_;
    stamp_ += count;
    for (int64_t i = 0; i < count; ++i) {
      if (i + 2 * ahead < count) problem.prefetch_start(order[i + 2 * ahead]);
      if (i + ahead < count) problem.prefetch_item(order[i + ahead]);
      if (i + table_ahead < count)
        problem.for_coordinates(order[i + table_ahead], [&](int64_t u) { fetch_early(&last_user_[u]); });
      parent_[i] = static_cast<uint32_t>(i);
      int64_t length = 0;
      problem.for_coordinates(order[i], [&](int64_t u) {
        const int64_t other = std::exchange(last_user_[u], static_cast<uint16_t>(first + i));
        if (other >= first) join(static_cast<uint32_t>(i), static_cast<uint32_t>(other - first));
        ++length;
      });
      cost_[i] = length + 4;
    }
  }

  uint32_t root(uint32_t i) {
    while (parent_[i] != i) i = parent_[i] = parent_[parent_[i]];
    return i;
  }

  // The root is the first update of its component.
  void join(uint32_t one, uint32_t other) {
    one = root(one), other = root(other);
    if (one < other) parent_[other] = one;
    else parent_[one] = other;
  }

  // The large components first, each to the thread with the least to do. After it parent_ is the root of each update.
  void assign(int64_t count, Parcels& parcels) {
    int64_t total = 0;
    parcels.components = 0;
    for (int64_t i = 0; i < count; ++i) {
      total += cost_[i];
      const uint32_t first = parent_[i] = parent_[parent_[i]];  // parents come first, so theirs are roots by now
      if (first == i) ++parcels.components;
      else cost_[first] += cost_[i];
    }
    std::fill(load_.begin(), load_.end(), 0);
    const int64_t large = total / (16 * static_cast<int64_t>(load_.size())) + 1;
    large_.clear();
    int64_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (parent_[i] != i) continue;
      largest = std::max(largest, cost_[i]);
      if (cost_[i] > large) large_.push_back(static_cast<uint32_t>(i));
    }
    std::sort(large_.begin(), large_.end(), [this](uint32_t a, uint32_t b) {
      return cost_[a] != cost_[b] ? cost_[a] > cost_[b] : a < b;
    });
    for (const uint32_t i : large_) give(i);
    for (int64_t i = 0; i < count; ++i)
      if (parent_[i] == i && cost_[i] <= large) give(static_cast<uint32_t>(i));
    parcels.largest = total > 0 ? largest * count / total : 0;
  }

  void give(uint32_t component) {
    const auto least = std::min_element(load_.begin(), load_.end());
    *least += cost_[component];
    thread_[component] = static_cast<uint8_t>(least - load_.begin());
  }

  std::vector<uint16_t> last_user_;  // of each coordinate: the stamp of the last update that has it
  std::vector<uint32_t> parent_;
  std::vector<int64_t> cost_;  // of each update as a measure of its time, then of each component
  std::vector<uint8_t> thread_;
  std::vector<int64_t> load_;
  std::vector<uint32_t> large_;
  int64_t stamp_ = 1;
};

}  // namespace paceline::sparse
