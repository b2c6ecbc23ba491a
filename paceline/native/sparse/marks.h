// Which coordinates the updates of a chunk have.
#pragma once
#include <array>
#include <cstdint>

namespace paceline::sparse {

// A set that may also seem to have what it has not: two bits of one word for each coordinate (Bloom, 1970). Another core
// reads all of it in each round, so it is small.
class Marks {
 public:
  void add(int64_t coordinate) {
    const uint32_t hash = hashed(coordinate);
    words_[hash >> shift] |= bits(hash);
  }
  bool has(int64_t coordinate) const {
    const uint32_t hash = hashed(coordinate);
    return (bits(hash) & ~words_[hash >> shift]) == 0;
  }
  void clear() { words_.fill(0); }
  void add_all(const Marks& others) {
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= others.words_[i];
  }

 private:
  static constexpr int log_words = 10, shift = 32 - log_words;

  static uint32_t hashed(int64_t coordinate) { return static_cast<uint32_t>(coordinate) * 0x9e3779b1u; }
  static uint64_t bits(uint32_t hash) { return uint64_t(1) << (hash & 63) | uint64_t(1) << (hash >> 6 & 63); }

  std::array<uint64_t, 1 << log_words> words_{};
};

}  // namespace paceline::sparse
