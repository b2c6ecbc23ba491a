// How an update reads and changes a coordinate. The arithmetic of a problem is written once, over one of these.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>

namespace paceline::sparse {

// Brings a cache line near before it is needed. The empty statement keeps it: GCC takes a function that does nothing but
// prefetch for one without effect, and drops the calls.
inline void fetch_early(const void* place) {
  __builtin_prefetch(place);
  asm volatile("");
}

// Nobody else writes: one thread, a lock is held, or no other thread has the coordinate.
struct Plain {
  template <class V>
  V load(const V& place) const { return place; }
  template <class V, class Change>
  void change(V& place, Change&& change) { place = change(place); }
};

// A race that is meant: each load and each store is atomic, both together are not, so an update may be lost.
struct Racy {
  template <class V>
  V load(const V& place) const {
    return std::atomic_ref<V>(const_cast<V&>(place)).load(std::memory_order_relaxed);
  }
  template <class V, class Change>
  void change(V& place, Change&& change) {
    std::atomic_ref<V>(place).store(change(load(place)), std::memory_order_relaxed);
  }
};

// As Racy, but the store is an exchange: if it returns another value than was read, it overwrote an update.
struct Watching : Racy {
  template <class V, class Change>
  void change(V& place, Change&& change) {
    const V before = load(place);
    const V replaced = std::atomic_ref<V>(place).exchange(change(before), std::memory_order_relaxed);
    ++sampled;
    if (std::memcmp(&replaced, &before, sizeof(V)) == 0) return;
    ++lost;
    overwritten += static_cast<double>(replaced) - static_cast<double>(before);
  }
  int64_t sampled = 0, lost = 0;
  double overwritten = 0;
};

// Compare and swap until nobody wrote in between: no update is lost.
struct Swapping : Racy {
  template <class V, class Change>
  void change(V& place, Change&& change) {
    std::atomic_ref<V> shared(place);
    V before = shared.load(std::memory_order_relaxed);
    while (!shared.compare_exchange_weak(before, change(before), std::memory_order_relaxed)) {
    }
  }
};

}  // namespace paceline::sparse
