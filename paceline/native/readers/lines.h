// Lines of text: numbers, blanks, the first mistake, and pieces of whole lines for several threads.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace paceline::readers {

constexpr int64_t largest_index = INT32_MAX - 1;  // so that the number of columns fits too

// Raised at the place of a mistake; `wanted` is a text that lives for ever.
struct Mistake {
  const char* place;
  const char* wanted;
};

inline bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v'; }

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The rest of one line.
struct Line {
  const char* at;
  const char* end;

  bool done() const { return at == end; }

  void skip_blanks() {
    while (at != end && is_blank(*at)) ++at;
  }

  // Whether nothing but blanks and a comment is left.
  bool is_over() {
    skip_blanks();
    return done() || *at == '#';
  }

  bool skip(char wanted) {
    if (done() || *at != wanted) return false;
    ++at;
    return true;
  }

  int64_t index(const char* wanted, int64_t least = 0) {
    const char* const first = at;
    int64_t number = 0;
    while (at != end && is_digit(*at) && number <= largest_index) number = 10 * number + (*at++ - '0');
    if (at == first || number < least || number > largest_index || (at != end && is_digit(*at)))
      throw Mistake{first, wanted};
    return number;
  }

  template <class Value>
  Value number(const char* wanted) {
    const char* const first = at;
    if (at != end && *at == '+') ++at;
    double number = 0;
    const auto [after, error] = std::from_chars(at, end, number);
    if (error == std::errc::invalid_argument || (at != first && *at == '-')) throw Mistake{first, wanted};
    if (error == std::errc::result_out_of_range) number = std::strtod(std::string(at, after).c_str(), nullptr);
    const auto value = static_cast<Value>(number);
    if (!std::isfinite(value)) throw Mistake{first, "a finite number that fits the type of the values"};
    at = after;
    return value;
  }
};

// Calls `read(line)` for every line; returns how many there were.
template <class Read>
int64_t for_each_line(const char* begin, const char* end, Read read) {
  int64_t lines = 0;
  while (begin != end) {
    const auto* newline = static_cast<const char*>(std::memchr(begin, '\n', static_cast<size_t>(end - begin)));
    read(Line{begin, newline == nullptr ? end : newline});
    begin = newline == nullptr ? end : newline + 1;
    ++lines;
  }
  return lines;
}

// Cuts the text after line ends into `count` pieces of about equal size; some may be empty.
inline std::vector<const char*> cut(const char* begin, const char* end, int count) {
  std::vector<const char*> cuts{begin};
  for (int piece = 1; piece < count; ++piece) {
    const char* from = begin + (end - begin) / count * piece;
    if (from < cuts.back()) from = cuts.back();
    const auto* newline = static_cast<const char*>(std::memchr(from, '\n', static_cast<size_t>(end - from)));
    cuts.push_back(newline == nullptr ? end : newline + 1);
  }
  cuts.push_back(end);
  return cuts;
}

}  // namespace paceline::readers
