#include "codecs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../instruction_sets.h"

// GCC on x86-64 compiles the loops twice and chooses at run time; other compilers and processors get them once.
#if defined(__x86_64__) && defined(__GNUC__)
#define PACELINE_X86
#include <immintrin.h>
#endif

namespace paceline::codecs {

int width_of(int levels) { return 1 + std::bit_width(static_cast<unsigned>(levels)); }

namespace {

// The eight signs of every byte, each as the highest bit of a word.
struct SignTable {
  uint32_t of[256][8];
  constexpr SignTable() : of() {
    for (int byte = 0; byte < 256; ++byte)
      for (int k = 0; k < 8; ++k) of[byte][k] = uint32_t(byte >> k & 1) << 31;
  }
};
constexpr SignTable sign_table;

namespace baseline {
#include "loops.inc"
}

#if defined(PACELINE_X86) && !defined(__clang__)
#define PACELINE_AVX2
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2")
namespace avx2 {
#include "loops.inc"
}
#pragma GCC pop_options
#endif

struct InstructionSet {
  const char* name;
  decltype(&baseline::sums) sums;
  decltype(&baseline::largest_bits) largest_bits;
  decltype(&baseline::round_to_levels) round_to_levels;
  decltype(&baseline::values_of_levels) values_of_levels;
  decltype(&baseline::to_fp8) to_fp8;
  decltype(&baseline::from_fp8) from_fp8;
  decltype(&baseline::pack) pack;
  decltype(&baseline::unpack) unpack;
  decltype(&baseline::write_signs) write_signs;
  decltype(&baseline::read_signs) read_signs;
  decltype(&baseline::at_least) at_least;
  decltype(&baseline::take_beyond) take_beyond;
  decltype(&baseline::make_orthonormal) make_orthonormal;
  decltype(&baseline::add_products) add_products;
  bool is_here;
};

#define PACELINE_LOOPS(set)                                                                              \
  set::sums, set::largest_bits, set::round_to_levels, set::values_of_levels, set::to_fp8, set::from_fp8, \
      set::pack, set::unpack, set::write_signs, set::read_signs, set::at_least, set::take_beyond,        \
      set::make_orthonormal, set::add_products

// The best one first.
const InstructionSet instruction_sets[] = {
#ifdef PACELINE_AVX2
    {"avx2", PACELINE_LOOPS(avx2), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")},
#endif
    {"baseline", PACELINE_LOOPS(baseline), true},
};

InstructionSets sets(instruction_sets);

const InstructionSet& loops() { return sets.used(); }

}  // namespace

std::pair<uint64_t, uint64_t> sums(const uint32_t* words, size_t count) { return loops().sums(words, count); }

uint32_t largest_bits(const float* values, size_t count) { return loops().largest_bits(values, count); }

void round_to_levels(const float* values, size_t count, const Rounding& how, float* norms, uint8_t* codes, bool packed) {
  loops().round_to_levels(values, count, how, norms, codes, packed);
}

void values_of_levels(const float* norms, const uint8_t* codes, size_t count, size_t bucket, int levels, bool packed,
                      float* out, bool add) {
  loops().values_of_levels(norms, codes, count, bucket, levels, packed, out, add);
}

void to_fp8(const float* values, size_t count, size_t bucket, float* scales, uint8_t* codes) {
  loops().to_fp8(values, count, bucket, scales, codes);
}

void from_fp8(const float* scales, const uint8_t* codes, size_t count, size_t bucket, float* out, bool add) {
  loops().from_fp8(scales, codes, count, bucket, out, add);
}

void pack(const uint8_t* codes, size_t count, int width, uint8_t* out) { loops().pack(codes, count, width, out); }

void unpack(const uint8_t* data, size_t count, int width, uint8_t* codes) { loops().unpack(data, count, width, codes); }

void write_signs(const float* values, float* residual, size_t count, size_t bucket, float* means, uint8_t* signs) {
  loops().write_signs(values, residual, count, bucket, means, signs);
}

void read_signs(const float* means, const uint8_t* signs, size_t count, size_t bucket, float* out, bool add) {
  loops().read_signs(means, signs, count, bucket, out, add);
}

size_t at_least(const float* values, size_t count, float least, int32_t* indices) {
  return loops().at_least(values, count, least, indices);
}

size_t take_beyond(const float* values, float* residual, size_t count, float tau, uint32_t* words) {
  return loops().take_beyond(values, residual, count, tau, words);
}

void make_orthonormal(float* p, size_t rank, size_t count) { loops().make_orthonormal(p, rank, count); }

void add_products(const float* p, const float* q, size_t rows, size_t columns, size_t rank, float* out, bool add) {
  loops().add_products(p, q, rows, columns, rank, out, add);
}

void add_at(const int64_t* indices, const float* values, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[indices[i]] += values[i];
}

const char* instruction_set() { return loops().name; }

bool choose_instruction_set(const std::string& name) { return sets.use(name); }

}  // namespace paceline::codecs
