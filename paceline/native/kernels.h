// Element-wise reductions over raw buffers, vectorised for the processor they run on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace paceline {

// The numbers are part of the interface to Python (collectives/core.py).
enum class Dtype : uint8_t { f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64, boolean };
enum class Reduce : uint8_t { none, sum, avg, min, max, product, band, bor, bxor };

constexpr int dtype_count = 13;
constexpr int reduce_count = 9;
constexpr int max_ranks = 1024;

size_t size_of(Dtype dtype);
const char* name_of(Dtype dtype);
const char* name_of(Reduce reduce);

// Whether there is a meaning: no averages of integers, no bits of floating-point numbers.
bool is_defined(Dtype dtype, Reduce reduce);

// destination[i] = sources[0][i] o sources[1][i] o ..., folded from left to right, for `count` elements and every
// destination. A destination may be one of the sources, or overlap none.
void reduce(Dtype dtype, Reduce reduce, void* const* destinations, int destination_count, const void* const* sources,
            int source_count, size_t count);

// Like memcpy, but also for nothing at all, and fast for any alignment: on some processors the C library's is five times
// slower if the two addresses differ in their last six bits.
void copy(void* to, const void* from, size_t bytes);

constexpr size_t past_cache_from = 1 << 20;  // bytes: less may be read again from a cache

// The same for memory that is too large to be read again from a cache: written past it, where the processor can.
void copy_past_cache(void* to, const void* from, size_t bytes);

// Whether all numbers of 32-bit floating point are finite, and the sum of all 64-bit words: in one pass over the memory.
struct Examined {
  bool finite;
  uint64_t checksum;
};
Examined examine(const void* from, size_t bytes);

// Both at once; past the cache if there is much of it.
Examined copy_examined(void* to, const void* from, size_t bytes);

// The instruction set that `reduce` uses: the best one here, unless another is chosen, for tests.
const char* instruction_set();
bool choose_instruction_set(const std::string& name);

}  // namespace paceline
