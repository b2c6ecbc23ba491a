// The loops of the codecs over raw buffers, vectorised for the processor they run on. The same loops written with torch
// operations are in paceline/codecs/; both must give the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace paceline::codecs {

// The sum of all words, and the sum of all words times their indices, modulo 2^64.
std::pair<uint64_t, uint64_t> sums(const uint32_t* words, size_t count);

// The bits of the largest absolute value; those of NaN and infinities are larger than those of any number.
uint32_t largest_bits(const float* values, size_t count);

// How QSGD rounds: the key is that of the random numbers.
struct Rounding {
  size_t bucket;
  int levels;
  bool two_norm;
  uint32_t key[2];
};

int width_of(int levels);  // of a level and, as its highest bit, the sign

// One byte for each value, or `width_of` bits if `packed`. Packed codes may be followed by up to 7 bytes of zeros.
void round_to_levels(const float* values, size_t count, const Rounding& how, float* norms, uint8_t* codes, bool packed);
void values_of_levels(const float* norms, const uint8_t* codes, size_t count, size_t bucket, int levels, bool packed,
                      float* out, bool add);

// Eight-bit floating point (E4M3); each bucket is divided by a scale that makes its largest value the largest there is.
void to_fp8(const float* values, size_t count, size_t bucket, float* scales, uint8_t* codes);
void from_fp8(const float* scales, const uint8_t* codes, size_t count, size_t bucket, float* out, bool add);

// Codes of less than 2^width, one in each byte, to and from `width` bits each.
void pack(const uint8_t* codes, size_t count, int width, uint8_t* out);
void unpack(const uint8_t* data, size_t count, int width, uint8_t* codes);

// Elias' gamma codes of levels and gaps, or delta codes of long gaps. Writing gives the number of levels that are not 0,
// and the bytes; reading tells whether the data is the code of so many of them.
std::pair<size_t, size_t> write_elias(const uint8_t* codes, size_t count, int levels, uint8_t* out);
bool read_elias(const uint8_t* data, size_t bytes, size_t coded, size_t count, int levels, uint8_t* codes);

// Signs of value plus residual, which becomes what they lack; without a residual it is null.
void write_signs(const float* values, float* residual, size_t count, size_t bucket, float* means, uint8_t* signs);
void read_signs(const float* means, const uint8_t* signs, size_t count, size_t bucket, float* out, bool add);

// The indices of all values whose absolute value is at least `least`; gives their number.
size_t at_least(const float* values, size_t count, float least, int32_t* indices);

// residual += values; then tau is taken from, or added to, all that are beyond it. A word is an index and the sign.
size_t take_beyond(const float* values, float* residual, size_t count, float tau, uint32_t* words);

// out[indices[i]] += values[i]
void add_at(const int64_t* indices, const float* values, size_t count, float* out);

// Rising indices as gaps, with one bit more each if `bits` is not null. Writing gives the bytes of the quotients; reading
// tells whether the data is the code of so many indices below `total`.
size_t write_gaps(const int64_t* indices, const int64_t* bits, size_t count, int shift, uint8_t* low, uint8_t* unary);
bool read_gaps(const uint8_t* low, const uint8_t* unary, size_t bytes, size_t count, int shift, size_t total,
               int64_t* indices, int64_t* bits);

// The rows made orthonormal by Gram and Schmidt, in double precision.
void make_orthonormal(float* p, size_t rank, size_t count);

// out = or += the sum over all rows of p and q of their outer products, from the first row to the last.
void add_products(const float* p, const float* q, size_t rows, size_t columns, size_t rank, float* out, bool add);

// The instruction set in use: the best one here, unless another is chosen, for tests.
const char* instruction_set();
bool choose_instruction_set(const std::string& name);

}  // namespace paceline::codecs
