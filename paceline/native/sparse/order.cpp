// Random orders, the same on every machine.
#include <numeric>
#include <utility>

#include "problem.h"

namespace paceline::sparse {

namespace {

// SplitMix64 (Steele et al., 2014).
uint64_t next(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// Below a bound, without a bias (Lemire, 2019).
uint32_t below(uint32_t bound, uint64_t& state) {
  uint64_t product = (next(state) >> 32) * bound;
  if (static_cast<uint32_t>(product) < bound) {
    const uint32_t least = -bound % bound;
    while (static_cast<uint32_t>(product) < least) product = (next(state) >> 32) * bound;
  }
  return static_cast<uint32_t>(product >> 32);
}

}  // namespace

void shuffle(uint32_t* order, int64_t count, uint64_t seed) {
  std::iota(order, order + count, 0u);
  for (int64_t left = count; left > 1; --left) std::swap(order[left - 1], order[below(static_cast<uint32_t>(left), seed)]);
}

}  // namespace paceline::sparse
