// Matrix completion: entries of a matrix that is the product of two thin ones.
#include <cmath>
#include <memory>
#include <vector>

#include "solver.h"

namespace paceline::sparse {

namespace {

struct Counted {
  std::vector<uint32_t> of_row, of_column;
};

template <class V, class I>
class Completion {
 public:
  using Gradient = V;
  struct Scratch {};
  struct Copy {
    std::vector<V> left, right;
  };

  explicit Completion(const CompletionData& data) : data_(data) {
    check_items(data.entries);
    check();
  }

  int64_t items() const { return data_.entries; }
  int64_t coordinates() const { return data_.rows + data_.columns; }  // a vector counts as one
  int64_t most_coordinates() const { return 2; }
  Scratch scratch() const { return {}; }

  void bind(const Parameters& parameters, double rate, int64_t) {
    left_ = reinterpret_cast<V*>(parameters[0]);
    right_ = reinterpret_cast<V*>(parameters[1]);
    rate_ = static_cast<V>(rate);
    share_ = static_cast<V>(rate * data_.regulariser);
  }

  void prefetch_start(uint32_t item) const {
    fetch_early(&row()[item]);
    fetch_early(&column()[item]);
    fetch_early(&values()[item]);
  }

  void prefetch_item(uint32_t) const {}

  void prefetch_parameters(uint32_t item) const {
    prefetch_vector(left(item));
    prefetch_vector(right(item));
  }

  template <class Use>
  void for_coordinates(uint32_t item, Use&& use) const {
    use(static_cast<int64_t>(row()[item]));
    use(data_.rows + static_cast<int64_t>(column()[item]));
  }

  template <class Access>
  Gradient compute(Access& access, uint32_t item, Scratch&) const {
    return predict(access, item) - values()[item];
  }

  template <class Access>
  void apply(Access& access, uint32_t item, Gradient difference, Scratch&) const {
    V* const l = left(item);
    V* const r = right(item);
    const V step = rate_ * difference;
    const V shrink_l = 1 / (1 + share_ / static_cast<V>(counted_->of_row[row()[item]]));
    const V shrink_r = 1 / (1 + share_ / static_cast<V>(counted_->of_column[column()[item]]));
    for (int64_t k = 0; k < data_.rank; ++k) {
      const V old_l = access.load(l[k]), old_r = access.load(r[k]);
      access.change(l[k], [=](V x) { return (x - step * old_r) * shrink_l; });
      access.change(r[k], [=](V x) { return (x - step * old_l) * shrink_r; });
    }
  }

  void judge(uint32_t item, Judged& sum) const {
    Plain access;
    const double difference = static_cast<double>(predict(access, item)) - values()[item];
    sum.loss += difference * difference / 2;
    sum.error += difference * difference;
  }

  void settle() const {}

  Copy copy() const { return {{left_, left_ + data_.rows * data_.rank}, {right_, right_ + data_.columns * data_.rank}}; }
  void use(Copy& copy) { left_ = copy.left.data(), right_ = copy.right.data(); }
  void average(const std::vector<Copy>& copies) const {
    mean(left_, data_.rows * data_.rank, copies, &Copy::left);
    mean(right_, data_.columns * data_.rank, copies, &Copy::right);
  }

 private:
  const I* row() const { return static_cast<const I*>(data_.row); }
  const I* column() const { return static_cast<const I*>(data_.column); }
  const V* values() const { return static_cast<const V*>(data_.values); }
  V* left(uint32_t item) const { return left_ + static_cast<int64_t>(row()[item]) * data_.rank; }
  V* right(uint32_t item) const { return right_ + static_cast<int64_t>(column()[item]) * data_.rank; }

  void prefetch_vector(const V* vector) const {
    for (int64_t k = 0; k < data_.rank; k += 64 / static_cast<int64_t>(sizeof(V))) fetch_early(vector + k);
  }

  template <class Access>
  V predict(Access& access, uint32_t item) const {
    const V* const l = left(item);
    const V* const r = right(item);
    V sums[4] = {0, 0, 0, 0};
    int64_t k = 0;
    for (; k + 4 <= data_.rank; k += 4)
      for (int64_t lane = 0; lane < 4; ++lane) sums[lane] += access.load(l[k + lane]) * access.load(r[k + lane]);
    for (; k < data_.rank; ++k) sums[0] += access.load(l[k]) * access.load(r[k]);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  static void mean(V* to, int64_t count, const std::vector<Copy>& copies, std::vector<V> Copy::*part) {
    for (int64_t i = 0; i < count; ++i) {
      double sum = -0.0;  // so that a mean of negative zeros is one
      for (const Copy& copy : copies) sum += (copy.*part)[i];
      to[i] = static_cast<V>(sum / static_cast<double>(copies.size()));
    }
  }

  void check() {
    auto counted = std::make_shared<Counted>();
    counted->of_row.assign(data_.rows, 0);
    counted->of_column.assign(data_.columns, 0);
    for (int64_t i = 0; i < data_.entries; ++i) {
      check_index(row()[i], data_.rows, "row of entry", i);
      check_index(column()[i], data_.columns, "column of entry", i);
      if (!std::isfinite(values()[i]))
        throw Refused("entry " + std::to_string(i) + " (row " + std::to_string(row()[i]) + ", column " +
                      std::to_string(column()[i]) + "): wanted a finite number, got " + std::to_string(values()[i]));
      ++counted->of_row[row()[i]];
      ++counted->of_column[column()[i]];
    }
    counted_ = std::move(counted);
  }

  CompletionData data_;
  std::shared_ptr<const Counted> counted_;
  V* left_ = nullptr;
  V* right_ = nullptr;
  V rate_ = 0, share_ = 0;
};

}  // namespace

std::unique_ptr<Problem> make_completion(const CompletionData& data, bool doubles, bool wide) {
  return with_types(doubles, wide, [&](auto value, auto index) -> std::unique_ptr<Problem> {
    return std::make_unique<Solver<Completion<decltype(value), decltype(index)>>>(data);
  });
}

}  // namespace paceline::sparse
