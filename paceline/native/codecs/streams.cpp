// Codes of variable length, which are written and read bit by bit: no instruction set helps.
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
    while (held_ <= 56 && at_ < end_) {
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

uint64_t reversed(uint64_t number, int width) {
  uint64_t result = 0;
  for (int i = 0; i < width; ++i, number >>= 1) result = result << 1 | (number & 1);
  return result;
}

struct Code {
  uint64_t bits;
  int length;
};

Code omega(uint64_t number) {
  Code code{0, 1};
  while (number > 1) {
    const int width = std::bit_width(number);
    code.bits = code.bits << width | reversed(number, width);
    code.length += width;
    number = width - 1;
  }
  return code;
}

constexpr int known_codes = 512;

struct Known {
  Code codes[known_codes];
  Known() {
    for (int i = 1; i < known_codes; ++i) codes[i] = omega(i);
  }
};

void put_omega(Writer& writer, uint64_t number) {
  static const Known known;
  const Code code = number < known_codes ? known.codes[number] : omega(number);
  if (code.length <= 32) return writer.put(code.bits, code.length);
  writer.put(code.bits & 0xffffffff, 32);
  writer.put(code.bits >> 32, code.length - 32);
}

// 0 if it is no code.
uint64_t take_omega(BitReader& reader) {
  uint64_t number = 1;
  while (reader.peek() & 1) {
    const int width = static_cast<int>(number) + 1;
    if (width > 32) return 0;
    number = reversed(reader.take(width), width);
    if (reader.overrun()) return 0;
  }
  reader.take(1);
  return reader.overrun() ? 0 : number;
}

}  // namespace

std::pair<size_t, size_t> write_elias(const uint8_t* codes, size_t count, int levels, uint8_t* out) {
  const int sign_at = width_of(levels) - 1;
  const uint8_t below_sign = static_cast<uint8_t>((1 << sign_at) - 1);
  Writer writer(out);
  size_t coded = 0, next = 0;  // the index behind the last one
  for (size_t i = 0; i < count; ++i) {
    const uint8_t level = codes[i] & below_sign;
    if (level == 0) continue;
    put_omega(writer, i + 1 - next);
    writer.put(codes[i] >> sign_at, 1);
    if (levels > 1) put_omega(writer, level);
    next = i + 1;
    ++coded;
  }
  return {coded, writer.finish()};
}

bool read_elias(const uint8_t* data, size_t bytes, size_t coded, size_t count, int levels, uint8_t* codes) {
  const int sign_at = width_of(levels) - 1;
  memset(codes, 0, count);
  BitReader reader(data, bytes);
  size_t next = 0;
  for (size_t i = 0; i < coded; ++i) {
    const uint64_t gap = take_omega(reader);
    if (gap == 0 || gap > count - next) return false;
    next += gap;
    const uint64_t sign = reader.take(1), level = levels > 1 ? take_omega(reader) : 1;
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
