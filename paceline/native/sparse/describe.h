// How sparse a problem is: the numbers of Niu et al. (2011).
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "problem.h"

namespace paceline::sparse {

// The items of each coordinate, an item once, in ascending order.
struct Users {
  template <class P>
  explicit Users(const P& problem) : start(problem.coordinates() + 1, 0) {
    std::vector<uint32_t> last(problem.coordinates(), UINT32_MAX);
    const auto for_distinct = [&](auto&& use) {
      std::fill(last.begin(), last.end(), UINT32_MAX);
      for (int64_t item = 0; item < problem.items(); ++item)
        problem.for_coordinates(static_cast<uint32_t>(item), [&](int64_t u) {
          if (last[u] != item) use(u, static_cast<uint32_t>(item));
          last[u] = static_cast<uint32_t>(item);
        });
    };
    for_distinct([&](int64_t u, uint32_t) { ++start[u + 1]; });
    std::partial_sum(start.begin(), start.end(), start.begin());
    items.resize(start.back());
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for_distinct([&](int64_t u, uint32_t item) { items[next[u]++] = item; });
  }
  int64_t count(int64_t u) const { return start[u + 1] - start[u]; }

  std::vector<int64_t> start;
  std::vector<uint32_t> items;
};

// The most items that share a coordinate with one item. Items come in the order of an upper bound, the sum over their
// coordinates, until the bound is below what was found: that is exact. It is also over when the budget is used up.
template <class P>
Described describe(const P& problem, int64_t budget) {
  Described found;
  const int64_t count = problem.items();
  if (count == 0) return found;
  const Users users(problem);
  for (int64_t u = 0; u < problem.coordinates(); ++u) found.busiest = std::max(found.busiest, users.count(u));
  std::vector<uint32_t> last(problem.coordinates(), UINT32_MAX), items(count);
  std::vector<int64_t> bound(count, 0);
  for (int64_t item = 0; item < count; ++item) {
    int64_t distinct = 0;
    problem.for_coordinates(static_cast<uint32_t>(item), [&](int64_t u) {
      if (last[u] == item) return;
      last[u] = static_cast<uint32_t>(item);
      bound[item] += users.count(u);
      ++distinct;
    });
    found.omega = std::max(found.omega, distinct);
  }
  std::iota(items.begin(), items.end(), 0u);
  std::sort(items.begin(), items.end(), [&](uint32_t a, uint32_t b) { return bound[a] > bound[b]; });
  std::vector<uint32_t> seen(count, UINT32_MAX);
  for (const uint32_t item : items) {
    if (std::min(bound[item], count) <= found.intersecting) return found;
    if ((budget -= bound[item]) < 0 && found.intersecting > 0) break;
    int64_t intersecting = 0;
    problem.for_coordinates(item, [&](int64_t u) {
      for (int64_t k = users.start[u]; k < users.start[u + 1]; ++k) {
        uint32_t& mark = seen[users.items[k]];
        if (mark == item) continue;
        mark = item;
        ++intersecting;
      }
    });
    found.intersecting = std::max(found.intersecting, intersecting);
  }
  found.exact = budget >= 0;
  return found;
}

}  // namespace paceline::sparse
