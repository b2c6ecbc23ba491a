// Every scheme on every problem, with more threads than cores, for the sanitizers; and what is lost where that is known.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "access.h"
#include "problem.h"

using namespace paceline::sparse;

namespace {

constexpr Scheme schemes[] = {Scheme::serial,      Scheme::hogwild, Scheme::atomic,  Scheme::locked,
                              Scheme::round_robin, Scheme::average, Scheme::cyclades};

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

std::mt19937 engine(1);

template <class T>
std::vector<T> drawn(size_t count, T below) {
  std::vector<T> numbers(count);
  for (T& number : numbers) number = static_cast<T>(engine() % static_cast<uint64_t>(below));
  return numbers;
}

template <class V>
std::vector<V> uniform(size_t count) {
  std::uniform_real_distribution<V> distribution(-1, 1);
  std::vector<V> numbers(count);
  for (V& number : numbers) number = distribution(engine);
  return numbers;
}

// Runs every scheme; cyclades must have the bits of serial.
template <class V>
void run_all(Problem& problem, std::vector<std::vector<V>> start) {
  std::vector<uint32_t> order(problem.items());
  std::vector<std::vector<V>> expected;
  for (const Scheme scheme : schemes)
    for (const int threads : {1, 2, 5}) {
      auto memory = start;
      Parameters parameters;
      for (auto& part : memory) parameters.push_back(reinterpret_cast<char*>(part.data()));
      for (uint64_t epoch = 0; epoch < 2; ++epoch) {
        shuffle(order.data(), problem.items(), epoch);
        Settings settings{scheme, threads, epoch == 0 ? 0 : 100, 4, 0.1, static_cast<int64_t>(epoch), 0,
                          order.data(), 0, problem.items(), nullptr, nullptr};
        Outcome outcome;
        problem.run(parameters, settings, outcome);
        require(outcome.updates == problem.items(), "every update is made");
      }
      if (scheme == Scheme::serial) expected = memory;
      if (scheme == Scheme::cyclades) require(memory == expected, "cyclades has the bits of serial");
      problem.judge(parameters, threads);
    }
  problem.describe(1000);
  problem.describe(1 << 30);
}

template <class V, class I>
void linear(bool intercept) {
  constexpr int64_t rows = 3000, columns = 2000, length = 5;
  std::vector<int64_t> starts(rows + 1);
  for (int64_t row = 0; row <= rows; ++row) starts[row] = row * length;
  const auto indices = drawn<I>(rows * length, columns);
  const auto values = uniform<V>(rows * length), weights = std::vector<V>(rows, V(0.5));
  std::vector<V> targets(rows, V(1));
  for (int64_t row = 0; row < rows; row += 2) targets[row] = -1;
  const LinearData data{rows, columns, rows * length, starts.data(), true, indices.data(), values.data(),
                        targets.data(), weights.data(), Loss::logistic, 1e-3, intercept};
  run_all<V>(*make_linear(data, sizeof(V) == 8, sizeof(I) == 8), {std::vector<V>(columns + 1, V(0))});
}

template <class V, class I>
void completion() {
  constexpr int64_t entries = 5000, rows = 900, columns = 700, rank = 5;
  const auto row = drawn<I>(entries, rows), column = drawn<I>(entries, columns);
  const auto values = uniform<V>(entries);
  const CompletionData data{entries, rows, columns, rank, row.data(), column.data(), values.data(), 0.1};
  run_all<V>(*make_completion(data, sizeof(V) == 8, sizeof(I) == 8), {uniform<V>(rows * rank), uniform<V>(columns * rank)});
}

template <class V, class I>
void cut() {
  constexpr int64_t edges = 5000, nodes = 3000, ways = 3;
  const auto tail = drawn<I>(edges, nodes), head = drawn<I>(edges, nodes);
  const std::vector<V> weights(edges, V(1));
  std::vector<uint8_t> fixed(nodes, 0);
  std::vector<V> points(nodes * ways, V(1) / ways);
  for (int64_t node = 0; node < ways; ++node) {
    fixed[node] = 1;
    for (int64_t k = 0; k < ways; ++k) points[node * ways + k] = k == node;
  }
  const CutData data{edges, nodes, ways, tail.data(), head.data(), weights.data(), fixed.data()};
  run_all<V>(*make_cut(data, sizeof(V) == 8, sizeof(I) == 8), {points});
}

// Another thread's store between a read and the exchange is seen, and how much it was.
void watching() {
  Watching access;
  double place = 1;
  access.change(place, [](double x) { return x + 1; });
  access.change(place, [&](double x) {
    place = 5;
    return x + 1;
  });
  require(place == 3 && access.sampled == 2 && access.lost == 1 && access.overwritten == 3, "the overwritten is counted");
}

// A run that is to end stops, and tells how far it came.
void interrupted() {
  constexpr int64_t rows = 2000;
  std::vector<int32_t> starts(rows + 1), indices(rows, 0);
  for (int32_t row = 0; row <= rows; ++row) starts[row] = row;
  const std::vector<double> ones(rows, 1.0);
  const LinearData data{rows, 1, rows, starts.data(), false, indices.data(), ones.data(), ones.data(), nullptr,
                        Loss::hinge, 0, false};
  const auto problem = make_linear(data, true, false);
  std::vector<uint32_t> order(rows);
  shuffle(order.data(), rows, 1);
  for (const Scheme scheme : schemes) {
    std::vector<double> memory(2, 0.0);
    const Parameters parameters{reinterpret_cast<char*>(memory.data())};
    Settings settings{scheme, 3, 16, 1, 1e-6, 0, 2e-3, order.data(), 0, rows, [](void*) { return true; }, nullptr};
    Outcome outcome;
    problem->run(parameters, settings, outcome);
    require(outcome.updates > 0 && outcome.updates < rows, "the run stops early");
  }
}

}  // namespace

int main() {
  watching();
  linear<float, int32_t>(false);
  linear<double, int64_t>(true);
  completion<float, int64_t>();
  completion<double, int32_t>();
  cut<float, int32_t>();
  cut<double, int64_t>();
  interrupted();
  std::puts("the sparse engine is clean");
}
