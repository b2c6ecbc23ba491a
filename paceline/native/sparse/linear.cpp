// Linear models: sparse support vector machines, logistic and least squares.
#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "solver.h"

namespace paceline::sparse {

namespace {

// What the regulariser multiplies a weight by: in an update with a gradient, and in one of those without.
template <class V>
struct Shrink {
  V once, for_skipped;
};

// What does not change: found out once, shared by the copies of a run.
struct Counted {
  std::vector<uint32_t> groups;  // of each column: those with as many entries
  std::vector<uint32_t> counts;  // how many entries a column of each group has
  int64_t most = 0;              // entries of a row
  double mean_square = 1;        // of all entries
};

// Four sums of products, in registers of 16 bytes, which every processor has.
template <class V>
class Sums {
 public:
  struct Four {
    V a, b, c, d;
  };

  void add(const Four& x, const Four& y) {
    if constexpr (sizeof(V) == 4) {
      parts_[0] += Part{x.a, x.b, x.c, x.d} * Part{y.a, y.b, y.c, y.d};
    } else {
      parts_[0] += Part{x.a, x.b} * Part{y.a, y.b};
      parts_[1] += Part{x.c, x.d} * Part{y.c, y.d};
    }
  }
  V total() const {
    if constexpr (sizeof(V) == 4) return (parts_[0][0] + parts_[0][1]) + (parts_[0][2] + parts_[0][3]);
    else return (parts_[0][0] + parts_[0][1]) + (parts_[1][0] + parts_[1][1]);
  }

 private:
  typedef V Part __attribute__((vector_size(16)));
  Part parts_[sizeof(V) / 4] = {};
};

template <class V, class I>
class Linear {
 public:
  using Gradient = V;
  struct Scratch {};
  using Copy = std::vector<V>;

  explicit Linear(const LinearData& data) : data_(data) {
    check_items(data.rows);
    check();
    // The parameters of few columns stay in the cache by themselves.
    prefetches_ = data.columns * static_cast<int64_t>(sizeof(V)) > (1 << 19);
  }

  int64_t items() const { return data_.rows; }
  int64_t coordinates() const { return data_.columns + data_.intercept; }
  int64_t most_coordinates() const { return counted_->most + 1; }
  Scratch scratch() const { return {}; }

  void bind(const Parameters& parameters, double rate, int64_t epoch) {
    coef_ = reinterpret_cast<V*>(parameters[0]);
    groups_ = counted_->groups.data();
    rate_ = static_cast<V>(rate);
    turn_ = static_cast<uint32_t>(epoch);
    intercept_scale_ = static_cast<V>(counted_->mean_square);
    if (data_.regulariser > 0 && rate > 0) find_shrinks(rate * data_.regulariser * static_cast<double>(data_.rows));
  }

  void prefetch_start(uint32_t item) const {
    fetch_early(static_cast<const char*>(data_.starts) + static_cast<int64_t>(item) * (data_.wide_starts ? 8 : 4));
    fetch_early(targets() + item);
  }

  void prefetch_item(uint32_t item) const {
    // The first lines, whether the row has them or not: the processor itself sees what follows, and a loop would cost
    // more than it gains.
    const auto* const index = reinterpret_cast<const char*>(indices() + start(item));
    const auto* const value = reinterpret_cast<const char*>(values() + start(item));
    fetch_early(index);
    fetch_early(index + 64);
    fetch_early(value);
    fetch_early(value + 64);
  }

  void prefetch_parameters(uint32_t item) const {
    if (!prefetches_) return;
    const int64_t first = start(item), end = std::min(start(item + 1), first + 128);
    for (int64_t k = first; k < end; ++k) fetch_early(&coef_[indices()[k]]);
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
    if (step == 0) {
      // Most rows of a trained hinge have no gradient. They write in turns, so that most only read.
      if (shrinks_ != nullptr && (item + turn_) % turns == 0) shrink_all(access, item);
      return;
    }
    const V* value = values();
    const I* index = indices();
    const Shrink<V>* const shrinks = shrinks_.get();
    const int64_t first = start(item), end = start(item + 1);
    if (shrinks == nullptr) {
      for (int64_t k = first; k < end; ++k) {
        const V change = step * value[k];
        access.change(coef_[index[k]], [=](V weight) { return weight - change; });
      }
    } else {
      for (int64_t k = first; k < end; ++k) {
        const V shrink = shrinks[groups_[index[k]]].once, change = step * value[k];
        access.change(coef_[index[k]], [=](V weight) { return (weight - change) * shrink; });
      }
    }
    if (data_.intercept) {
      const V change = step * intercept_scale_;
      access.change(coef_[data_.columns], [=](V weight) { return weight - change; });
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

  Copy copy() const { return Copy(coef_, coef_ + data_.columns + 1); }
  void use(Copy& copy) { coef_ = copy.data(); }
  void average(const std::vector<Copy>& copies) const {
    for (int64_t u = 0; u <= data_.columns; ++u) {
      double sum = -0.0;  // so that a mean of negative zeros is one
      for (const Copy& copy : copies) sum += copy[u];
      coef_[u] = static_cast<V>(sum / static_cast<double>(copies.size()));
    }
  }

 private:
  static constexpr uint32_t turns = 16;

  // The regulariser is split over the entries of a column. Each takes an implicit step, which never overshoots: with
  // few entries an explicit one would be longer than the weight itself. Columns of as many entries have one factor.
  void find_shrinks(double share) {
    const auto& counts = counted_->counts;
    auto shrinks = std::make_shared<Shrink<V>[]>(counts.size());
    for (size_t group = 0; group < counts.size(); ++group) {
      const double each = share / counts[group];
      shrinks[group] = {static_cast<V>(1 / (1 + each)), static_cast<V>(1 / (1 + turns * each))};
    }
    shrinks_ = std::move(shrinks);
  }

  template <class Access>
  void shrink_all(Access& access, uint32_t item) const {
    for (int64_t k = start(item), end = start(item + 1); k < end; ++k) {
      const V shrink = shrinks_[groups_[indices()[k]]].for_skipped;
      access.change(coef_[indices()[k]], [=](V weight) { return weight * shrink; });
    }
  }

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
    const auto weight = [&](int64_t place) { return access.load(coef_[index[place]]); };
    Sums<V> sums;
    for (; k + 4 <= end; k += 4)
      sums.add({weight(k), weight(k + 1), weight(k + 2), weight(k + 3)}, {value[k], value[k + 1], value[k + 2], value[k + 3]});
    if (k < end) {
      // Up to three are left. Products with 0 take less time than a loop whose end is not foreseen.
      const int64_t second = k + 1 < end ? k + 1 : k, third = k + 2 < end ? k + 2 : k;
      sums.add({weight(k), weight(second), weight(third), 0},
               {value[k], k + 1 < end ? value[second] : 0, k + 2 < end ? value[third] : 0, 0});
    }
    return data_.intercept ? sums.total() + access.load(coef_[data_.columns]) : sums.total();
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
    counted->most = longest_row();
    const int64_t used = start(data_.rows);  // there may be more entries than the rows have
    const double squares = sum_of_squares(used);
    for (int64_t row = 0; row < data_.rows; ++row) check_row(row);
    counted->groups.assign(data_.columns, 0);
    for (int64_t k = 0; k < used; ++k) ++counted->groups[indices()[k]];
    group(*counted);
    if (used > 0) counted->mean_square = squares / static_cast<double>(used);
    counted_ = std::move(counted);
  }

  int64_t longest_row() const {
    if (start(0) != 0 || start(data_.rows) > data_.entries)
      throw Refused("indptr: wanted numbers from 0 to " + std::to_string(data_.entries) + ", got " +
                    std::to_string(start(0)) + " to " + std::to_string(start(data_.rows)));
    int64_t most = 0;
    for (int64_t row = 0; row < data_.rows; ++row) {
      const int64_t first = start(row), end = start(row + 1);
      if (end < first || end > data_.entries)
        throw Refused("indptr: row " + std::to_string(row) + " begins at " + std::to_string(first) + " and ends at " +
                      std::to_string(end) + " of " + std::to_string(data_.entries) + " entries");
      most = std::max(most, end - first);
    }
    return most;
  }

  // Checks the entries too, with few branches for what is nearly always right: a number that is not finite has no finite
  // square.
  double sum_of_squares(int64_t used) const {
    using Unsigned = std::make_unsigned_t<I>;  // of which an index below 0 is a large one
    Unsigned largest = 0;
    for (int64_t k = 0; k < used; ++k) largest = std::max(largest, static_cast<Unsigned>(indices()[k]));
    const bool right = used == 0 || static_cast<uint64_t>(largest) < static_cast<uint64_t>(data_.columns);
    const auto value = [&](int64_t k) { return static_cast<double>(values()[k]); };
    Sums<double> sums;
    int64_t k = 0;
    for (; k + 4 <= used; k += 4) {
      const Sums<double>::Four four{value(k), value(k + 1), value(k + 2), value(k + 3)};
      sums.add(four, four);
    }
    double squares = sums.total();
    for (; k < used; ++k) squares += value(k) * value(k);
    if (!right || !std::isfinite(squares))
      for (int64_t row = 0; row < data_.rows; ++row) check_entries(row);
    return squares;
  }

  void check_entries(int64_t row) const {
    for (int64_t k = start(row), end = start(row + 1); k < end; ++k) {
      check_index(indices()[k], data_.columns, "row", row);
      if (!std::isfinite(values()[k]))
        throw Refused("row " + std::to_string(row) + ", column " + std::to_string(indices()[k]) +
                      ": wanted a finite number, got " + std::to_string(values()[k]));
    }
  }

  // From the number of each column's entries to its group.
  static void group(Counted& counted) {
    uint32_t most = 0;
    for (const uint32_t count : counted.groups) most = std::max(most, count);
    std::vector<uint32_t> group_of_count(static_cast<size_t>(most) + 1, 0);
    for (const uint32_t count : counted.groups) group_of_count[count] = 1;
    for (uint32_t count = 0; count <= most; ++count) {
      if (group_of_count[count] == 0) continue;
      group_of_count[count] = static_cast<uint32_t>(counted.counts.size());
      counted.counts.push_back(std::max(1u, count));
    }
    for (uint32_t& column : counted.groups) column = group_of_count[column];
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
  V* coef_ = nullptr;  // and the intercept
  const uint32_t* groups_ = nullptr;
  std::shared_ptr<const Shrink<V>[]> shrinks_;  // of each group, or none
  V rate_ = 0;
  uint32_t turn_ = 0;
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
