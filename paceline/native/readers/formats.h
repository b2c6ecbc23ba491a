// The three formats: each struct holds what it has read from a piece of text, and reads one line at a time.
#pragma once

#include <algorithm>

#include "lines.h"

namespace paceline::readers {

// How many rows have something odd, and where the first one is.
struct Oddity {
  int64_t rows = 0;
  const char* first = nullptr;

  void count(const char* place) {
    if (rows++ == 0) first = place;
  }
};

// svmlight and libsvm: `target index:value index:value ... # comment`.
template <class Value>
struct Libsvm {
  std::vector<Value> targets, values;
  std::vector<int64_t> lengths;
  std::vector<int32_t> indices;
  Oddity unsorted, repeated;
  int32_t largest = -1;

  // Makes room for what the text can hold at most: vectors that grow copy what they have, again and again.
  void prepare(const char* begin, const char* end) {
    const auto lines = static_cast<size_t>(std::count(begin, end, '\n')) + 1;
    const auto entries = static_cast<size_t>(std::count(begin, end, ':'));
    targets.reserve(lines), lengths.reserve(lines);
    indices.reserve(entries), values.reserve(entries);
  }

  void read(Line line) {
    if (line.is_over()) return;
    const char* const start = line.at;
    targets.push_back(line.number<Value>("a number as the target of the row"));
    if (!line.done() && !is_blank(*line.at) && *line.at != '#') throw Mistake{line.at, "a blank after the target"};
    const size_t first = indices.size();
    bool sorted = true;
    while (!line.is_over()) {
      if (is_query(line)) continue;
      const auto index = static_cast<int32_t>(line.index("an index from 0 to 2147483646, then a colon and a value"));
      if (!line.skip(':')) throw Mistake{line.at, "a colon after the index"};
      values.push_back(line.number<Value>("a number as the value"));
      if (!line.done() && !is_blank(*line.at) && *line.at != '#') throw Mistake{line.at, "a blank after the value"};
      sorted = sorted && (indices.size() == first || indices.back() < index);
      indices.push_back(index);
      largest = std::max(largest, index);
    }
    lengths.push_back(static_cast<int64_t>(indices.size() - first));
    if (!sorted) look_closer(first, start);
  }

 private:
  static bool is_query(Line& line) {
    if (line.end - line.at < 4 || std::memcmp(line.at, "qid:", 4) != 0) return false;
    line.at += 4;
    line.number<double>("a number after qid:");
    if (!line.done() && !is_blank(*line.at) && *line.at != '#') throw Mistake{line.at, "a blank after the query"};
    return true;
  }

  void look_closer(size_t first, const char* start) {
    const auto row = indices.begin() + static_cast<std::ptrdiff_t>(first);
    if (!std::is_sorted(row, indices.end())) unsorted.count(start);
    std::vector<int32_t> ordered(row, indices.end());
    std::sort(ordered.begin(), ordered.end());
    if (std::adjacent_find(ordered.begin(), ordered.end()) != ordered.end()) repeated.count(start);
  }
};

// Ratings: `user item value ...`, between them blanks, a comma or two colons; or, as Netflix has them, `item:` and then
// lines `user,value,...`.
template <class Value>
struct Ratings {
  static constexpr int32_t unknown = -1;

  bool by_item = false;      // Netflix's form
  int32_t item = unknown;    // of the lines to come, if by item
  std::vector<int32_t> users, items;
  std::vector<Value> values;
  int32_t largest_user = -1, largest_item = -1;
  const char* first_entry = nullptr;

  void prepare(const char* begin, const char* end) {
    const auto lines = static_cast<size_t>(std::count(begin, end, '\n')) + 1;
    users.reserve(lines), items.reserve(lines), values.reserve(lines);
  }

  void read(Line line) {
    if (line.is_over() || *line.at == '%') return;
    const char* const start = line.at;
    const auto number = static_cast<int32_t>(line.index("a number of a user or item, from 0 to 2147483646"));
    if (by_item && is_heading(line)) {
      item = number;
      largest_item = std::max(largest_item, item);
      return;
    }
    if (first_entry == nullptr) first_entry = start;
    users.push_back(number);
    largest_user = std::max(largest_user, number);
    items.push_back(by_item ? item : second(line));
    separator(line);
    values.push_back(line.number<Value>("a number as the rating"));
    if (!line.done() && !is_blank(*line.at) && *line.at != ',' && *line.at != ':' && *line.at != '#')
      throw Mistake{line.at, "a blank, a comma or :: after the rating"};
  }

 private:
  static bool is_heading(Line line) { return line.skip(':') && line.is_over(); }

  int32_t second(Line& line) {
    separator(line);
    const auto number = static_cast<int32_t>(line.index("the number of an item, from 0 to 2147483646"));
    largest_item = std::max(largest_item, number);
    return number;
  }

  static void separator(Line& line) {
    const char* const before = line.at;
    line.skip_blanks();
    if (line.end - line.at >= 2 && line.at[0] == ':' && line.at[1] == ':') {
      line.at += 2;
    } else if (!line.skip(',') && line.at == before) {
      throw Mistake{line.at, "a blank, a comma or :: between the fields"};
    }
    line.skip_blanks();
  }
};

// DIMACS max-flow: `p max NODES ARCS`, `n NODE s`, `n NODE t`, `a FROM TO CAPACITY`, and comments `c ...`.
struct Dimacs {
  int64_t nodes = 0, arcs = 0, source = 0, sink = 0;
  std::vector<int32_t> tails, heads;
  std::vector<double> capacities;

  void prepare(const char*, const char*) {}

  void read(Line line) {
    line.skip_blanks();
    if (line.done() || *line.at == 'c') return;
    const char kind = *line.at;
    const char* const start = line.at++;
    if ((kind != 'p' && kind != 'n' && kind != 'a') || line.done() || !is_blank(*line.at))
      throw Mistake{start, "a line that begins with c, p, n or a"};
    line.skip_blanks();
    if (kind == 'p') return problem(line, start);
    if (nodes == 0) throw Mistake{start, "the line p max NODES ARCS before this one"};
    if (kind == 'n') terminal(line);
    if (kind == 'a') arc(line);
    line.skip_blanks();
    if (!line.done()) throw Mistake{line.at, "the end of the line"};
  }

 private:
  void problem(Line& line, const char* start) {
    if (nodes != 0) throw Mistake{start, "one line p alone"};
    if (line.end - line.at < 4 || std::memcmp(line.at, "max", 3) != 0 || !is_blank(line.at[3]))
      throw Mistake{line.at, "max, since only max-flow problems are read"};
    line.at += 3;
    line.skip_blanks();
    const int64_t found = line.index("the number of nodes, at least 2", 2);
    line.skip_blanks();
    arcs = line.index("the number of arcs");
    line.skip_blanks();
    if (!line.done()) throw Mistake{line.at, "the end of the line"};
    nodes = found;
  }

  int32_t node(Line& line) {
    line.skip_blanks();
    const char* const place = line.at;
    const int64_t number = line.index("a node, from 1 to the number of nodes", 1);
    if (number > nodes) throw Mistake{place, "a node, from 1 to the number of nodes"};
    return static_cast<int32_t>(number);
  }

  void terminal(Line& line) {
    const int64_t number = node(line);
    line.skip_blanks();
    const char* const place = line.at;
    int64_t* const end = line.skip('s') ? &source : line.skip('t') ? &sink : nullptr;
    if (end == nullptr) throw Mistake{place, "s or t"};
    if (*end != 0) throw Mistake{place, "one source and one sink"};
    *end = number;
  }

  void arc(Line& line) {
    tails.push_back(node(line));
    heads.push_back(node(line));
    line.skip_blanks();
    const char* const place = line.at;
    capacities.push_back(line.number<double>("a capacity"));
    if (capacities.back() < 0) throw Mistake{place, "a capacity of at least 0"};
  }
};

}  // namespace paceline::readers
