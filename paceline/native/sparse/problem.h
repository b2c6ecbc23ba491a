// What the Python face knows of a problem: its size, and how to run, judge and describe it. All else is in templates.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace paceline::sparse {

enum class Scheme { serial, hogwild, atomic, locked, round_robin, average, cyclades };

constexpr int max_threads = 256;

// The memory of the parameters, as Python's arrays hold it; a problem knows how many there are and how long.
using Parameters = std::vector<char*>;

struct Settings {
  Scheme scheme = Scheme::serial;
  int threads = 1;
  int64_t batch = 0;      // updates of a round of cyclades; 0: as many as are best
  int64_t watch = 64;     // hogwild: every so many updates the stores are watched; 0 is never
  double rate = 0;
  int64_t epoch = 0;
  double delay = 0;       // seconds that each gradient takes in addition
  const uint32_t* order = nullptr;
  int64_t start = 0, end = 0;  // of the order
  // Called by the calling thread a few times a second; true ends the run early.
  bool (*interrupted)(void*) = nullptr;
  void* context = nullptr;
};

struct Outcome {
  int64_t updates = 0;
  int64_t sampled = 0, lost = 0;
  double overwritten = 0;
  int64_t rounds = 0, waited = 0;  // cyclades: of the threads; updates
};

struct Judged {
  double loss = 0;   // summed over the items, by weight
  double error = 0;  // wrong signs by weight, or squared differences
};

struct Described {
  int64_t omega = 0;         // most coordinates of an item
  int64_t busiest = 0;       // items of the coordinate that most items have
  int64_t intersecting = 0;  // items that share a coordinate with the item that shares with most
  bool exact = true;         // else the last is the most that was found
};

struct Problem {
  virtual ~Problem() = default;
  virtual int64_t items() const = 0;
  virtual void run(const Parameters& parameters, const Settings& settings, Outcome& outcome) = 0;
  virtual Judged judge(const Parameters& parameters, int threads) const = 0;
  virtual Described describe(int64_t budget) const = 0;
};

struct Refused : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

enum class Loss { hinge, logistic, squared };

struct LinearData {
  int64_t rows = 0, columns = 0, entries = 0;
  const void* starts = nullptr;  // rows + 1 numbers
  bool wide_starts = true;       // of 64 bits
  const void* indices = nullptr;
  const void* values = nullptr;
  const void* targets = nullptr;
  const void* weights = nullptr;  // of the rows, or none
  Loss loss = Loss::hinge;
  double regulariser = 0;
  bool intercept = false;
};

struct CompletionData {
  int64_t entries = 0, rows = 0, columns = 0, rank = 0;
  const void* row = nullptr;
  const void* column = nullptr;
  const void* values = nullptr;
  double regulariser = 0;
};

struct CutData {
  int64_t edges = 0, nodes = 0, ways = 0;
  const void* tail = nullptr;
  const void* head = nullptr;
  const void* weights = nullptr;
  const uint8_t* fixed = nullptr;  // one byte for each node
};

std::unique_ptr<Problem> make_linear(const LinearData& data, bool doubles, bool wide);
std::unique_ptr<Problem> make_completion(const CompletionData& data, bool doubles, bool wide);
std::unique_ptr<Problem> make_cut(const CutData& data, bool doubles, bool wide);

// A random order of 0 to count - 1, the same for the same seed on every machine.
void shuffle(uint32_t* order, int64_t count, uint64_t seed);

// Calls ``make`` with a value of each type that the flags name.
template <class Make>
std::unique_ptr<Problem> with_types(bool doubles, bool wide, Make&& make) {
  if (doubles && wide) return make(double(), int64_t());
  if (doubles) return make(double(), int32_t());
  if (wide) return make(float(), int64_t());
  return make(float(), int32_t());
}

}  // namespace paceline::sparse
