// Codes of variable length, which are written and read bit by bit: no instruction set helps.
#include <algorithm>
#include <bit>
#include <cstring>

#include "codecs.h"

namespace paceline::codecs {
namespace {

class Writer {
 public:
  explicit Writer(uint8_t* out) : start_(out), out_(out) {}

  void put(uint64_t bits, int length) {  // at most 32 at a time
    word_ |= bits << held_;
    held_ += length;
    if (held_ < 32) return;
    const uint32_t low = static_cast<uint32_t>(word_);
    memcpy(out_, &low, 4);
    out_ += 4;
    word_ >>= 32;
    held_ -= 32;
  }

  // Writes what is held, and gives the number of bytes.
  size_t finish() {
    for (; held_ > 0; held_ -= 8, word_ >>= 8) *out_++ = static_cast<uint8_t>(word_);
    held_ = 0;
    return out_ - start_;
  }

 private:
  uint8_t *start_, *out_;
  uint64_t word_ = 0;
  int held_ = 0;
};

// Past the end there are zeros; `overrun` tells whether any of them was read.
class BitReader {
 public:
  BitReader(const uint8_t* data, size_t bytes) : at_(data), end_(data + bytes) {}

  uint64_t peek() {
    if (held_ <= 32 && end_ - at_ >= 4) {
      uint32_t next;
      memcpy(&next, at_, 4);
      word_ |= uint64_t(next) << held_;
      at_ += 4;
      held_ += 32;
    }
    while (held_ <= 32 && at_ < end_) {
      word_ |= uint64_t(*at_++) << held_;
      held_ += 8;
    }
    return word_;
  }

  uint64_t take(int length) {  // at most 32
    const uint64_t bits = peek() & ((uint64_t(1) << length) - 1);
    word_ >>= length;
    held_ -= length;
    overrun_ = overrun_ || held_ < 0;
    if (held_ < 0) held_ = 0;
    return bits;
  }

  bool overrun() const { return overrun_; }
  bool ended() { return held_ < 8 && at_ == end_ && word_ == 0; }

 private:
  const uint8_t *at_, *end_;
  uint64_t word_ = 0;
  int held_ = 0;
  bool overrun_ = false;
};

struct Code {
  uint64_t bits;
  int length;
};

// As many zeros as the number has bits behind its first one; a one; those bits.
Code gamma(uint64_t number) {
  const int behind = std::bit_width(number) - 1;
  const uint64_t rest = number ^ uint64_t(1) << behind;
  return {(rest << 1 | 1) << behind, 2 * behind + 1};
}

// The number of bits, in that code, and those behind the first one.
Code delta(uint64_t number) {
  const int width = std::bit_width(number);
  const Code head = gamma(width);
  return {head.bits | (number ^ uint64_t(1) << (width - 1)) << head.length, head.length + width - 1};
}

// Gaps that are as long as this in the mean are shorter in the second code.
constexpr size_t long_gap = 24;

bool has_long_gaps(size_t coded, size_t count) { return coded * long_gap <= count; }

void put_long(Writer& writer, Code code) {
  if (code.length > 32) {
    writer.put(code.bits & 0xffffffff, 32);
    code = {code.bits >> 32, code.length - 32};
  }
  writer.put(code.bits, code.length);
}

// 0 if it is no code of a number below 2^32.
uint64_t take_gamma(BitReader& reader) {
  const int behind = std::countr_zero(reader.peek());
  if (behind > 31) return 0;
  reader.take(behind + 1);
  return uint64_t(1) << behind | reader.take(behind);
}

uint64_t take_delta(BitReader& reader) {
  const uint64_t width = take_gamma(reader);
  if (width == 0 || width > 32) return 0;
  return uint64_t(1) << (width - 1) | reader.take(static_cast<int>(width) - 1);
}

}  // namespace

std::pair<size_t, size_t> write_elias(const uint8_t* codes, size_t count, int levels, uint8_t* out) {
  const int sign_at = width_of(levels) - 1;
  const uint8_t below_sign = static_cast<uint8_t>((1 << sign_at) - 1);
  const size_t coded = std::count_if(codes, codes + count, [&](uint8_t code) { return (code & below_sign) != 0; });
  const bool long_gaps = has_long_gaps(coded, count);
  Writer writer(out);
  size_t next = 0;  // the index behind the last one
  for (size_t i = 0; i < count; ++i) {
    const uint8_t level = codes[i] & below_sign;
    if (level == 0) continue;
    const Code gap = long_gaps ? delta(i + 1 - next) : gamma(i + 1 - next);
    const Code size = levels > 1 ? gamma(level) : Code{0, 0};
    const Code rest{uint64_t(codes[i] >> sign_at) | size.bits << 1, size.length + 1};
    if (gap.length + rest.length <= 32) {
      writer.put(gap.bits | rest.bits << gap.length, gap.length + rest.length);
    } else {
      put_long(writer, gap);
      writer.put(rest.bits, rest.length);
    }
    next = i + 1;
  }
  return {coded, writer.finish()};
}

bool read_elias(const uint8_t* data, size_t bytes, size_t coded, size_t count, int levels, uint8_t* codes) {
  const int sign_at = width_of(levels) - 1;
  const bool long_gaps = has_long_gaps(coded, count);
  memset(codes, 0, count);
  BitReader reader(data, bytes);
  size_t next = 0;
  for (size_t i = 0; i < coded; ++i) {
    const uint64_t gap = long_gaps ? take_delta(reader) : take_gamma(reader);
    if (gap == 0 || gap > count - next) return false;
    next += gap;
    const uint64_t sign = reader.take(1), level = levels > 1 ? take_gamma(reader) : 1;
    if (level == 0 || level > static_cast<uint64_t>(levels) || reader.overrun()) return false;
    codes[next - 1] = static_cast<uint8_t>(level | sign << sign_at);
  }
  return true;
}

size_t write_gaps(const int64_t* indices, const int64_t* bits, size_t count, int shift, uint8_t* low, uint8_t* unary) {
  Writer remainders(low), quotients(unary);
  int64_t before = -1;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t gap = static_cast<uint64_t>(indices[i] - before - 1);
    before = indices[i];
    const uint64_t remainder = gap & ((uint64_t(1) << shift) - 1);
    if (bits != nullptr) remainders.put(remainder << 1 | static_cast<uint64_t>(bits[i]), shift + 1);
    else remainders.put(remainder, shift);
    uint64_t quotient = gap >> shift;
    for (; quotient >= 31; quotient -= 31) quotients.put(0, 31);
    quotients.put(uint64_t(1) << quotient, static_cast<int>(quotient) + 1);
  }
  remainders.finish();
  return quotients.finish();
}

bool read_gaps(const uint8_t* low, const uint8_t* unary, size_t bytes, size_t count, int shift, size_t total,
               int64_t* indices, int64_t* bits) {
  BitReader remainders(low, (count * (shift + (bits != nullptr)) + 7) / 8), quotients(unary, bytes);
  uint64_t next = 0;
  for (size_t i = 0; i < count; ++i) {
    uint64_t quotient = 0;
    for (uint64_t word = quotients.peek(); (word & 0xffffffff) == 0; word = quotients.peek()) {
      quotients.take(32);
      quotient += 32;
      if (quotients.overrun()) return false;
    }
    const int zeros = std::countr_zero(quotients.peek());
    quotients.take(zeros);
    quotients.take(1);
    if (bits != nullptr) bits[i] = static_cast<int64_t>(remainders.take(1));
    next += ((quotient + zeros) << shift) + remainders.take(shift);
    if (next >= total || quotients.overrun()) return false;
    indices[i] = static_cast<int64_t>(next++);
  }
  return quotients.ended();
}

}  // namespace paceline::codecs
