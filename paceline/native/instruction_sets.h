// Loops that are compiled for several instruction sets: the best one here is used, unless another is chosen, for tests.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

namespace paceline {

// A set has a `name`, its loops, and `is_here`: whether this processor has it. The best comes first; the last one is
// on every processor.
template <class Set, size_t count>
class InstructionSets {
 public:
  explicit InstructionSets(const Set (&sets)[count]) : sets_(sets), used_(sets) {
    while (!used_.load()->is_here) ++used_;
  }

  const Set& used() const { return *used_.load(std::memory_order_relaxed); }

  // Uses the set of this name from now on; false if it is not here.
  bool use(const std::string& name) {
    for (const Set& set : sets_)
      if (set.is_here && name == set.name) {
        used_.store(&set);
        return true;
      }
    return false;
  }

 private:
  const Set (&sets_)[count];
  std::atomic<const Set*> used_;
};

}  // namespace paceline
