// Linear models: sparse support vector machines, logistic and least squares.
#include <cmath>
#include <memory>
#include <vector>

#include "solver.h"

namespace paceline::sparse {

namespace {

// A weight and what it is multiplied by in each update, side by side: one cache line for both.
template <class V>
struct Pair {
  V weight, shrink;
};

// What does not change: found out once, shared by the copies of a run.
struct Counted {
  std::vector<uint32_t> entries;  // of each column
  int64_t most = 0;               // entries of a row
  double mean_square = 1;         // of all entries
};

template <class V, class I>
class Linear {
 public:
  using Gradient = V;
  struct Scratch {};
  using Copy = std::vector<Pair<V>>;

  explicit Linear(const LinearData& data) : data_(data) {
    check_items(data.rows);
    check();
    // The parameters of few columns stay in the cache by themselves.
    prefetches_ = data.columns * static_cast<int64_t>(sizeof(Pair<V>)) > (1 << 18);
  }

  int64_t items() const { return data_.rows; }
  int64_t coordinates() const { return data_.columns + data_.intercept; }
  int64_t most_coordinates() const { return counted_->most + 1; }
  Scratch scratch() const { return {}; }

  void bind(const Parameters& parameters, double rate) {
    pairs_ = reinterpret_cast<Pair<V>*>(parameters[0]);
    rate_ = static_cast<V>(rate);
    wide_rate_ = rate;
    intercept_scale_ = static_cast<V>(counted_->mean_square);
  }

  // The regulariser is split over the entries of a column. Each takes an implicit step, which never overshoots: with
  // few entries an explicit one would be longer than the weight itself.
  void set_rate() const {
    const double share = wide_rate_ * data_.regulariser * static_cast<double>(data_.rows);
    for (int64_t u = 0; u < data_.columns; ++u)
      if (counted_->entries[u] > 0) pairs_[u].shrink = static_cast<V>(1 / (1 + share / counted_->entries[u]));
    pairs_[data_.columns].shrink = 1;
  }

  void prefetch_start(uint32_t item) const {
    __builtin_prefetch(static_cast<const char*>(data_.starts) + static_cast<int64_t>(item) * (data_.wide_starts ? 8 : 4));
    __builtin_prefetch(targets() + item);
  }

  void prefetch_item(uint32_t item) const {
    const int64_t first = start(item), end = start(item + 1);
    for (int64_t k = first; k < end && k < first + 256; k += 64 / static_cast<int64_t>(sizeof(I)))
      __builtin_prefetch(indices() + k);
    for (int64_t k = first; k < end && k < first + 256; k += 64 / static_cast<int64_t>(sizeof(V)))
      __builtin_prefetch(values() + k);
  }

  void prefetch_parameters(uint32_t item) const {
    if (!prefetches_) return;
    const int64_t first = start(item), end = std::min(start(item + 1), first + 128);
    for (int64_t k = first; k < end; ++k) __builtin_prefetch(&pairs_[indices()[k]], 1);
  }

  template <class Use>
  void for_coordinates(uint32_t item, Use&& use) const {
    for (int64_t k = start(item), end = start(item + 1); k < end; ++k) use(static_cast<int64_t>(indices()[k]));
    if (data_.intercept) use(data_.columns);
  }

  template <class Access>
  Gradient compute(Access& access, uint32_t item, Scratch&) const {
    const V slope = derivative(predict(access, item), targets()[item]);
    return data_.weights == nullptr ? slope : slope * weights()[item];
  }

  template <class Access>
  void apply(Access& access, uint32_t item, Gradient gradient, Scratch&) const {
    const V step = rate_ * gradient;
    if (step == 0 && data_.regulariser == 0) return;
    const V* value = values();
    const I* index = indices();
    for (int64_t k = start(item), end = start(item + 1); k < end; ++k) {
      Pair<V>& pair = pairs_[index[k]];
      const V shrink = pair.shrink, change = step * value[k];
      access.change(pair.weight, [=](V weight) { return (weight - change) * shrink; });
    }
    if (data_.intercept && step != 0) {
      const V change = step * intercept_scale_;
      access.change(pairs_[data_.columns].weight, [=](V weight) { return weight - change; });
    }
  }

  void judge(uint32_t item, Judged& sum) const {
    Plain access;
    const double prediction = predict(access, item), target = targets()[item];
    const double weight = data_.weights == nullptr ? 1 : weights()[item];
    sum.loss += weight * loss(prediction, target);
    const double difference = prediction - target;
    const bool wrong = (prediction > 0) != (target > 0);  // as the estimators predict: a score of 0 is the negative class
    sum.error += weight * (data_.loss == Loss::squared ? difference * difference : wrong);
  }

  void settle() const {}

  Copy copy() const { return Copy(pairs_, pairs_ + data_.columns + 1); }
  void use(Copy& copy) { pairs_ = copy.data(); }
  void average(const std::vector<Copy>& copies) const {
    for (int64_t u = 0; u <= data_.columns; ++u) {
      double sum = 0;
      for (const Copy& copy : copies) sum += copy[u].weight;
      pairs_[u].weight = static_cast<V>(sum / static_cast<double>(copies.size()));
    }
  }

 private:
  const I* indices() const { return static_cast<const I*>(data_.indices); }
  const V* values() const { return static_cast<const V*>(data_.values); }
  const V* targets() const { return static_cast<const V*>(data_.targets); }
  const V* weights() const { return static_cast<const V*>(data_.weights); }
  int64_t start(int64_t row) const {
    return data_.wide_starts ? static_cast<const int64_t*>(data_.starts)[row]
                             : static_cast<const int32_t*>(data_.starts)[row];
  }

  // Four sums, so that additions need not wait for each other.
  template <class Access>
  V predict(Access& access, uint32_t item) const {
    const V* value = values();
    const I* index = indices();
    int64_t k = start(item);
    const int64_t end = start(item + 1);
    V a = 0, b = 0, c = 0, d = 0;
    for (; k + 4 <= end; k += 4) {
      a += access.load(pairs_[index[k]].weight) * value[k];
      b += access.load(pairs_[index[k + 1]].weight) * value[k + 1];
      c += access.load(pairs_[index[k + 2]].weight) * value[k + 2];
      d += access.load(pairs_[index[k + 3]].weight) * value[k + 3];
    }
    for (; k < end; ++k) a += access.load(pairs_[index[k]].weight) * value[k];
    const V sum = (a + b) + (c + d);
    return data_.intercept ? sum + access.load(pairs_[data_.columns].weight) : sum;
  }

  V derivative(V prediction, V target) const {
    switch (data_.loss) {
      case Loss::hinge: return prediction * target < 1 ? -target : V(0);
      case Loss::logistic: return -target / (1 + std::exp(prediction * target));
      case Loss::squared: return prediction - target;
    }
    return 0;
  }

  double loss(double prediction, double target) const {
    const double margin = prediction * target, difference = prediction - target;
    switch (data_.loss) {
      case Loss::hinge: return std::max(0.0, 1 - margin);
      case Loss::logistic: return margin > 0 ? std::log1p(std::exp(-margin)) : std::log1p(std::exp(margin)) - margin;
      case Loss::squared: return difference * difference / 2;
    }
    return 0;
  }

  void check() {
    auto counted = std::make_shared<Counted>();
    counted->entries.assign(data_.columns, 0);
    double squares = 0;
    if (start(0) != 0 || start(data_.rows) > data_.entries)
      throw Refused("indptr: wanted numbers from 0 to " + std::to_string(data_.entries) + ", got " +
                    std::to_string(start(0)) + " to " + std::to_string(start(data_.rows)));
    for (int64_t row = 0; row < data_.rows; ++row) {
      const int64_t first = start(row), end = start(row + 1);
      if (end < first || end > data_.entries)
        throw Refused("indptr: row " + std::to_string(row) + " begins at " + std::to_string(first) + " and ends at " +
                      std::to_string(end) + " of " + std::to_string(data_.entries) + " entries");
      counted->most = std::max(counted->most, end - first);
      for (int64_t k = first; k < end; ++k) {
        check_index(indices()[k], data_.columns, "row", row);
        if (!std::isfinite(values()[k]))
          throw Refused("row " + std::to_string(row) + ", column " + std::to_string(indices()[k]) +
                        ": wanted a finite number, got " + std::to_string(values()[k]));
        ++counted->entries[indices()[k]];
        squares += static_cast<double>(values()[k]) * values()[k];
      }
      check_row(row);
    }
    if (data_.entries > 0) counted->mean_square = squares / static_cast<double>(data_.entries);
    counted_ = std::move(counted);
  }

  void check_row(int64_t row) const {
    const V target = targets()[row];
    const bool right = data_.loss == Loss::squared ? std::isfinite(target) : target == 1 || target == -1;
    if (!right)
      throw Refused("row " + std::to_string(row) + ": wanted a target " +
                    (data_.loss == Loss::squared ? "that is finite" : "of -1 or 1") + ", got " + std::to_string(target));
    if (data_.weights != nullptr && !(std::isfinite(weights()[row]) && weights()[row] >= 0))
      throw Refused("row " + std::to_string(row) + ": wanted a finite weight of at least 0, got " +
                    std::to_string(weights()[row]));
  }

  LinearData data_;
  std::shared_ptr<const Counted> counted_;
  Pair<V>* pairs_ = nullptr;
  V rate_ = 0;
  double wide_rate_ = 0;
  V intercept_scale_ = 1;  // the intercept learns as fast as the weight of an entry of mean size
  bool prefetches_ = true;
};

}  // namespace

std::unique_ptr<Problem> make_linear(const LinearData& data, bool doubles, bool wide) {
  return with_types(doubles, wide, [&](auto value, auto index) -> std::unique_ptr<Problem> {
    return std::make_unique<Solver<Linear<decltype(value), decltype(index)>>>(data);
  });
}

}  // namespace paceline::sparse
