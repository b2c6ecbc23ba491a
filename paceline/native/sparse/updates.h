// One update, and what brings its memory near before it is made.
//
// A problem P has: items(), coordinates(), prefetch_start(item), prefetch_item(item), prefetch_parameters(item),
// for_coordinates(item, f) over what an update writes, P::Gradient, P::Scratch, bind(parameters, rate, epoch),
// compute(access, item, scratch), apply(access, item, gradient, scratch), settle() and the copies of `average`.
#pragma once
#include <algorithm>
#include <cstdint>

#include "problem.h"
#include "team.h"

namespace paceline::sparse {

constexpr int64_t start_ahead = 24, item_ahead = 12, parameters_ahead = 4;

// Spends the time of an artificial delay.
inline void pretend_to_compute(double seconds) {
  if (seconds <= 0) return;
  const auto start = Clock::now();
  while (seconds_since(start) < seconds) {
  }
}

template <class P, class Access>
void update(const P& problem, Access& access, uint32_t item, typename P::Scratch& scratch, double delay) {
  auto&& gradient = problem.compute(access, item, scratch);
  pretend_to_compute(delay);
  problem.apply(access, item, gradient, scratch);
}

template <class P>
void prefetch(const P& problem, const uint32_t* order, int64_t i, int64_t end) {
  if (i + start_ahead < end) problem.prefetch_start(order[i + start_ahead]);
  if (i + item_ahead < end) problem.prefetch_item(order[i + item_ahead]);
  if (i + parameters_ahead < end) problem.prefetch_parameters(order[i + parameters_ahead]);
}

// What the prefetches of the updates before ``start`` would have brought, had they been made here.
template <class P>
void approach(const P& problem, const uint32_t* order, int64_t start, int64_t end) {
  const auto each = [&](int64_t count, auto&& use) {
    for (int64_t i = start; i < std::min(end, start + count); ++i) use(order[i]);
  };
  each(start_ahead, [&](uint32_t item) { problem.prefetch_start(item); });
  each(item_ahead, [&](uint32_t item) { problem.prefetch_item(item); });
  each(parameters_ahead, [&](uint32_t item) { problem.prefetch_parameters(item); });
}

}  // namespace paceline::sparse
