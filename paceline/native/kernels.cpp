#include "kernels.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "instruction_sets.h"

// GCC on x86-64 compiles the loops twice and chooses at run time; other compilers and processors get them once.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PACELINE_TWO_SETS
#include <immintrin.h>
#endif

namespace paceline {
namespace {

constexpr size_t block_bytes = 8192;  // a few of these fit a first-level cache

inline float float_from_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | (fraction << 13) | (fraction ? 0x400000 : 0));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

// Rounds to nearest, ties to even.
inline uint16_t half_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= 0x47800000) return sign | 0x7c00;  // 2^16 and more
  if (magnitude < 0x38800000) {                       // below 2^-14: adding 0.5 leaves the rounded multiple of 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

enum class Way { look, copy, copy_past_cache };

namespace baseline {
#include "kernels.inc"
}

#ifdef PACELINE_TWO_SETS
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define PACELINE_F16C
namespace avx2 {
#include "kernels.inc"
}
#undef PACELINE_F16C
#pragma GCC pop_options
#endif

using Block = void (*)(Dtype, Reduce, void*, const void* const*, int, size_t);

struct InstructionSet {
  const char* name;
  Block reduce_block;
  void (*copy_block[2])(char*, const char*, size_t);  // the second past the cache
  Examined (*examine_block[3])(char*, const char*, size_t);  // by the way
  bool is_here;
};

// The best one first.
const InstructionSet instruction_sets[] = {
#ifdef PACELINE_TWO_SETS
    {"avx2", avx2::reduce_block, {avx2::copy_block<Way::copy>, avx2::copy_block<Way::copy_past_cache>},
     {avx2::examine_block<Way::look>, avx2::examine_block<Way::copy>, avx2::examine_block<Way::copy_past_cache>},
     __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")},
#endif
    {"baseline", baseline::reduce_block, {baseline::copy_block<Way::copy>, baseline::copy_block<Way::copy_past_cache>},
     {baseline::examine_block<Way::look>, baseline::examine_block<Way::copy>,
      baseline::examine_block<Way::copy_past_cache>},
     true},
};

InstructionSets sets(instruction_sets);

Examined examine_by(Way way, void* to, const void* from, size_t bytes) {
  const auto examine_block = sets.used().examine_block[static_cast<int>(way)];
  return examine_block(static_cast<char*>(to), static_cast<const char*>(from), bytes);
}

// Instructions that write past the cache want addresses that are multiples of 16.
Way way_past_cache(const void* to) {
  return reinterpret_cast<uintptr_t>(to) % 16 == 0 ? Way::copy_past_cache : Way::copy;
}

// What was written past the cache is there before others are told of it.
void finish(Way way) {
#ifdef PACELINE_TWO_SETS
  if (way == Way::copy_past_cache) _mm_sfence();
#else
  static_cast<void>(way);
#endif
}

// Sums of truth values are "or", products "and", so that they stay truth values.
Reduce for_booleans(Reduce op) {
  if (op == Reduce::sum || op == Reduce::max) return Reduce::bor;
  if (op == Reduce::product || op == Reduce::min) return Reduce::band;
  return op;
}

}  // namespace

size_t size_of(Dtype dtype) {
  static constexpr size_t sizes[dtype_count] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1};
  return sizes[static_cast<int>(dtype)];
}

const char* name_of(Dtype dtype) {
  static constexpr const char* names[dtype_count] = {"float32", "float64", "float16", "bfloat16", "int8",   "int16", "int32",
                                                     "int64",   "uint8",   "uint16",  "uint32",   "uint64", "bool"};
  return names[static_cast<int>(dtype)];
}

const char* name_of(Reduce reduce) {
  static constexpr const char* names[reduce_count] = {"", "sum", "avg", "min", "max", "product", "band", "bor", "bxor"};
  return names[static_cast<int>(reduce)];
}

bool is_defined(Dtype dtype, Reduce op) {
  const bool floating = dtype == Dtype::f32 || dtype == Dtype::f64 || dtype == Dtype::f16 || dtype == Dtype::bf16;
  if (op == Reduce::none) return false;
  if (op == Reduce::avg) return floating;
  return !floating || op == Reduce::sum || op == Reduce::min || op == Reduce::max || op == Reduce::product;
}

void reduce(Dtype dtype, Reduce op, void* const* destinations, int destination_count, const void* const* sources,
            int source_count, size_t count) {
  const Block reduce_block = sets.used().reduce_block;
  if (dtype == Dtype::boolean) op = for_booleans(op);
  const size_t size = size_of(dtype);
  const bool sixteen_bits = dtype == Dtype::f16 || dtype == Dtype::bf16;
  const size_t block = block_bytes / (sixteen_bits ? sizeof(float) : size);
  const void* from[max_ranks];
  for (size_t start = 0; start < count; start += block) {
    const size_t length = std::min(block, count - start), at = start * size;
    for (int k = 0; k < source_count; ++k) from[k] = static_cast<const char*>(sources[k]) + at;
    char* first = static_cast<char*>(destinations[0]) + at;
    if (source_count > 1) reduce_block(dtype, op, first, from, source_count, length);
    else copy(first, from[0], length * size);
    for (int k = 1; k < destination_count; ++k)
      copy(static_cast<char*>(destinations[k]) + at, first, length * size);
  }
}

void copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0 || to == from) return;
  sets.used().copy_block[0](static_cast<char*>(to), static_cast<const char*>(from), bytes);
}

void copy_past_cache(void* to, const void* from, size_t bytes) {
  const Way way = way_past_cache(to);
  sets.used().copy_block[way == Way::copy_past_cache](
      static_cast<char*>(to), static_cast<const char*>(from), bytes);
  finish(way);
}

Examined examine(const void* from, size_t bytes) { return examine_by(Way::look, nullptr, from, bytes); }

Examined copy_examined(void* to, const void* from, size_t bytes) {
  const Way way = bytes < past_cache_from ? Way::copy : way_past_cache(to);
  const Examined found = examine_by(way, to, from, bytes);
  finish(way);
  return found;
}

const char* instruction_set() { return sets.used().name; }

bool choose_instruction_set(const std::string& name) { return sets.use(name); }

}  // namespace paceline
