// Joins a problem's arithmetic to the schemes.
#pragma once
#include <algorithm>
#include <vector>

#include "describe.h"
#include "schemes.h"

namespace paceline::sparse {

// Sums over blocks of items whose number does not depend on the number of threads, so neither does the result.
template <class P>
Judged judge_all(const P& problem, int threads) {
  constexpr int64_t blocks = 256;
  std::vector<Judged> sums(blocks);
  std::atomic<int64_t> next{0};
  run_team(threads, [&](int) {
    for (int64_t block; (block = next.fetch_add(1)) < blocks;) {
      Judged sum;
      for (int64_t i = problem.items() * block / blocks; i < problem.items() * (block + 1) / blocks; ++i)
        problem.judge(static_cast<uint32_t>(i), sum);
      sums[block] = sum;
    }
  });
  Judged total;
  for (const Judged& sum : sums) total.loss += sum.loss, total.error += sum.error;
  return total;
}

template <class P>
class Solver : public Problem {
 public:
  template <class Data>
  explicit Solver(const Data& data) : problem_(data) {}

  int64_t items() const override { return problem_.items(); }

  void run(const Parameters& parameters, const Settings& settings, Outcome& outcome) override {
    const P problem = bound(parameters, settings.rate, settings.epoch);
    Schemes<P>(problem, settings, outcome).run();
  }

  Judged judge(const Parameters& parameters, int threads) const override {
    return judge_all(bound(parameters), threads);
  }

  Described describe(int64_t budget) const override { return sparse::describe(problem_, budget); }

 private:
  P bound(const Parameters& parameters, double rate = 0, int64_t epoch = 0) const {
    P problem = problem_;
    problem.bind(parameters, rate, epoch);
    return problem;
  }

  const P problem_;
};

// Refuses an index that is none.
template <class I>
void check_index(I index, int64_t below, const char* what, int64_t place) {
  if (index >= 0 && static_cast<int64_t>(index) < below) return;
  throw Refused(std::string(what) + " " + std::to_string(place) + ": wanted an index from 0 to " +
                std::to_string(below - 1) + ", got " + std::to_string(static_cast<int64_t>(index)));
}

inline void check_items(int64_t count) {
  if (count >= UINT32_MAX) throw Refused("wanted fewer than 4294967295 items, got " + std::to_string(count));
}

}  // namespace paceline::sparse
