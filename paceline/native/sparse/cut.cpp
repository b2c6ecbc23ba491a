// Graph cuts: each node has a point of the simplex of K labels, and each edge pulls its two nodes together.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "solver.h"

namespace paceline::sparse {

namespace {

// The nearest point of the simplex (Held et al., 1974); ``sorted`` has room for as many numbers.
template <class V>
void project(V* point, int64_t ways, V* sorted) {
  std::copy(point, point + ways, sorted);
  std::sort(sorted, sorted + ways, std::greater<V>());
  V sum = 0, shift = 0;
  for (int64_t k = 0; k < ways; ++k) {
    sum += sorted[k];
    const V candidate = (sum - 1) / static_cast<V>(k + 1);
    if (sorted[k] > candidate) shift = candidate;
  }
  for (int64_t k = 0; k < ways; ++k) point[k] = std::max(V(0), point[k] - shift);
}

template <class V, class I>
class Cut {
 public:
  struct Scratch {
    std::vector<V> pull, point, sorted;
  };
  using Gradient = const V*;
  using Copy = std::vector<V>;

  explicit Cut(const CutData& data) : data_(data) {
    check_items(data.edges);
    check();
  }

  int64_t items() const { return data_.edges; }
  int64_t coordinates() const { return data_.nodes; }  // a point counts as one
  int64_t most_coordinates() const { return 2; }
  Scratch scratch() const {
    const std::vector<V> room(data_.ways);
    return {room, room, room};
  }

  void bind(const Parameters& parameters, double rate, int64_t) {
    points_ = reinterpret_cast<V*>(parameters[0]);
    rate_ = static_cast<V>(rate);
  }

  void prefetch_start(uint32_t item) const {
    fetch_early(&tail()[item]);
    fetch_early(&head()[item]);
    fetch_early(&weights()[item]);
  }

  void prefetch_item(uint32_t) const {}

  void prefetch_parameters(uint32_t item) const {
    fetch_early(point(tail()[item]));
    fetch_early(point(head()[item]));
  }

  template <class Use>
  void for_coordinates(uint32_t item, Use&& use) const {
    if (is_free(tail()[item])) use(static_cast<int64_t>(tail()[item]));
    if (is_free(head()[item])) use(static_cast<int64_t>(head()[item]));
  }

  // By how much the tail is pulled to the head: the rate times the weight, but not past the place where they meet.
  template <class Access>
  Gradient compute(Access& access, uint32_t item, Scratch& scratch) const {
    const V longest = rate_ * weights()[item];
    const V share = is_free(tail()[item]) && is_free(head()[item]) ? V(0.5) : V(1);
    const V* const u = point(tail()[item]);
    const V* const v = point(head()[item]);
    for (int64_t k = 0; k < data_.ways; ++k) {
      const V apart = share * (access.load(v[k]) - access.load(u[k]));
      scratch.pull[k] = std::clamp(apart, -longest, longest);
    }
    return scratch.pull.data();
  }

  template <class Access>
  void apply(Access& access, uint32_t item, Gradient pull, Scratch& scratch) const {
    if (tail()[item] == head()[item]) return;
    if (is_free(tail()[item])) move(access, point(tail()[item]), pull, V(1), scratch);
    if (is_free(head()[item])) move(access, point(head()[item]), pull, V(-1), scratch);
  }

  // The relaxed cut: half the weighted distances. The error is the cut when each node takes its largest label.
  void judge(uint32_t item, Judged& sum) const {
    const V* const u = point(tail()[item]);
    const V* const v = point(head()[item]);
    double distance = 0;
    for (int64_t k = 0; k < data_.ways; ++k) distance += std::abs(static_cast<double>(u[k]) - v[k]);
    sum.loss += weights()[item] * distance / 2;
    if (label(u) != label(v)) sum.error += weights()[item];
  }

  // Racing threads write points coordinate by coordinate, so some may lie beside the simplex.
  void settle() const {
    std::vector<V> sorted(data_.ways);
    for (int64_t node = 0; node < data_.nodes; ++node)
      if (is_free(node)) project(point(node), data_.ways, sorted.data());
  }

  Copy copy() const { return Copy(points_, points_ + data_.nodes * data_.ways); }
  void use(Copy& copy) { points_ = copy.data(); }
  void average(const std::vector<Copy>& copies) const {
    for (int64_t i = 0; i < data_.nodes * data_.ways; ++i) {
      double sum = -0.0;  // so that a mean of negative zeros is one
      for (const Copy& copy : copies) sum += copy[i];
      points_[i] = static_cast<V>(sum / static_cast<double>(copies.size()));
    }
  }

 private:
  const I* tail() const { return static_cast<const I*>(data_.tail); }
  const I* head() const { return static_cast<const I*>(data_.head); }
  const V* weights() const { return static_cast<const V*>(data_.weights); }
  bool is_free(int64_t node) const { return data_.fixed[node] == 0; }
  V* point(int64_t node) const { return points_ + node * data_.ways; }
  int64_t label(const V* point) const { return std::max_element(point, point + data_.ways) - point; }

  template <class Access>
  void move(Access& access, V* place, Gradient pull, V sign, Scratch& scratch) const {
    V* const moved = scratch.point.data();
    for (int64_t k = 0; k < data_.ways; ++k) moved[k] = access.load(place[k]) + sign * pull[k];
    project(moved, data_.ways, scratch.sorted.data());
    for (int64_t k = 0; k < data_.ways; ++k) {
      const V before = access.load(place[k]), after = moved[k];
      access.change(place[k], [=](V now) { return after + (now - before); });
    }
  }

  void check() const {
    for (int64_t i = 0; i < data_.edges; ++i) {
      check_index(tail()[i], data_.nodes, "tail of edge", i);
      check_index(head()[i], data_.nodes, "head of edge", i);
      if (!(std::isfinite(weights()[i]) && weights()[i] >= 0))
        throw Refused("edge " + std::to_string(i) + " (" + std::to_string(tail()[i]) + ", " + std::to_string(head()[i]) +
                      "): wanted a finite weight of at least 0, got " + std::to_string(weights()[i]));
    }
  }

  CutData data_;
  V* points_ = nullptr;
  V rate_ = 0;
};

}  // namespace

std::unique_ptr<Problem> make_cut(const CutData& data, bool doubles, bool wide) {
  return with_types(doubles, wide, [&](auto value, auto index) -> std::unique_ptr<Problem> {
    return std::make_unique<Solver<Cut<decltype(value), decltype(index)>>>(data);
  });
}

}  // namespace paceline::sparse
