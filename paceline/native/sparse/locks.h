// Spin locks shared by many coordinates each. An update takes all that it needs in ascending order, so none waits in a
// circle.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "access.h"
#include "team.h"

namespace paceline::sparse {

class Locks {
 public:
  explicit Locks(int64_t coordinates) {
    while (coordinates >> shift_ > most) ++shift_;
    taken_ = std::make_unique<std::atomic<bool>[]>((coordinates >> shift_) + 1);
  }

  // Neighbours share, so the locks of ascending coordinates ascend.
  uint32_t lock_of(int64_t coordinate) const { return static_cast<uint32_t>(coordinate >> shift_); }
  void prefetch(int64_t coordinate) const { fetch_early(&taken_[lock_of(coordinate)]); }

  void take(std::vector<uint32_t>& wanted) {
    if (!std::is_sorted(wanted.begin(), wanted.end())) std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    for (const uint32_t lock : wanted)
      for (Patience patience; taken_[lock].exchange(true, std::memory_order_acquire);) patience.wait();
  }

  void release(const std::vector<uint32_t>& held) {
    for (const uint32_t lock : held) taken_[lock].store(false, std::memory_order_release);
  }

 private:
  static constexpr int64_t most = 1 << 20;
  int shift_ = 0;
  std::unique_ptr<std::atomic<bool>[]> taken_;
};

}  // namespace paceline::sparse
