// The Python face: a block of whole lines comes in, bytes of arrays go out; the interpreter's lock is free meanwhile.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <new>
#include <optional>
#include <thread>

#include "formats.h"

namespace {

using namespace paceline::readers;

struct Text {
  Py_buffer view{};
  ~Text() {
    if (view.obj != nullptr) PyBuffer_Release(&view);
  }
  const char* begin() const { return static_cast<const char*>(view.buf); }
  const char* end() const { return begin() + view.len; }
};

template <class Format>
struct Piece {
  Format format;
  int64_t lines = 0;
  std::optional<Mistake> mistake;
  bool out_of_memory = false;

  void read(const char* begin, const char* end) noexcept {
    try {
      format.prepare(begin, end);
      lines = for_each_line(begin, end, [this](Line line) { format.read(line); });
    } catch (const Mistake& found) {
      mistake = found;
    } catch (const std::exception&) {
      out_of_memory = true;
    }
  }
};

template <class Format>
std::vector<Piece<Format>> read_pieces(const Text& text, int threads, const Format& begun) {
  std::vector<Piece<Format>> pieces(static_cast<size_t>(threads), Piece<Format>{begun, 0, {}, false});
  const std::vector<const char*> cuts = cut(text.begin(), text.end(), threads);
  std::vector<std::jthread> others;
  size_t next = 1;
  try {
    for (; next < pieces.size(); ++next)
      others.emplace_back([&, next] { pieces[next].read(cuts[next], cuts[next + 1]); });
  } catch (const std::exception&) {  // no more threads are to be had
  }
  pieces[0].read(cuts[0], cuts[1]);
  for (; next < pieces.size(); ++next) pieces[next].read(cuts[next], cuts[next + 1]);
  others.clear();  // waits
  return pieces;
}

// One array of all pieces, as bytes.
template <class Format, class Member>
PyObject* joined(const std::vector<Piece<Format>>& pieces, Member member) {
  size_t bytes = 0;
  for (const auto& piece : pieces) bytes += (piece.format.*member).size() * sizeof((piece.format.*member)[0]);
  PyObject* all = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes));
  if (all == nullptr) return nullptr;
  char* to = PyBytes_AsString(all);
  for (const auto& piece : pieces) {
    const auto& part = piece.format.*member;
    const size_t size = part.size() * sizeof(part[0]);
    if (size != 0) std::memcpy(to, part.data(), size);
    to += size;
  }
  return all;
}

template <class Format>
int64_t lines_of(const std::vector<Piece<Format>>& pieces) {
  int64_t lines = 0;
  for (const auto& piece : pieces) lines += piece.lines;
  return lines;
}

template <class Format, class Member>
int32_t largest_of(const std::vector<Piece<Format>>& pieces, Member member) {
  int32_t largest = -1;
  for (const auto& piece : pieces) largest = std::max(largest, piece.format.*member);
  return largest;
}

// A dict with the first mistake; null without an error if there is none.
template <class Format>
PyObject* failure(const Text& text, const std::vector<Piece<Format>>& pieces) {
  for (const auto& piece : pieces) {
    if (piece.out_of_memory) return PyErr_NoMemory();
    if (piece.mistake)
      return Py_BuildValue("{s:n,s:s}", "offset", static_cast<Py_ssize_t>(piece.mistake->place - text.begin()), "wanted",
                           piece.mistake->wanted);
  }
  return nullptr;
}

template <class Format>
PyObject* oddity(const Text& text, const std::vector<Piece<Format>>& pieces, Oddity Format::*member) {
  int64_t rows = 0;
  const char* first = nullptr;
  for (const auto& piece : pieces) {
    const Oddity& found = piece.format.*member;
    if (rows == 0) first = found.first;
    rows += found.rows;
  }
  return Py_BuildValue("(Ln)", static_cast<long long>(rows),
                       static_cast<Py_ssize_t>(first == nullptr ? 0 : first - text.begin()));
}

// Reads the text with the interpreter's lock free; `finish` makes the result with it held.
template <class Format, class Finish>
PyObject* read_text(const Text& text, int threads, const Format& begun, Finish finish) {
  std::vector<Piece<Format>> pieces;
  bool out_of_memory = false;
  Py_BEGIN_ALLOW_THREADS
  try {
    pieces = read_pieces(text, threads, begun);
  } catch (const std::exception&) {
    out_of_memory = true;
  }
  Py_END_ALLOW_THREADS
  if (out_of_memory) return PyErr_NoMemory();
  PyObject* failed = failure(text, pieces);
  return failed != nullptr || PyErr_Occurred() ? failed : finish(pieces);
}

bool check_threads(int threads) {
  if (threads >= 1) return true;
  PyErr_Format(PyExc_ValueError, "threads must be at least 1, got %d", threads);
  return false;
}

template <class Value>
PyObject* libsvm_of(const Text& text, int threads) {
  using Format = Libsvm<Value>;
  return read_text(text, threads, Format{}, [&](const std::vector<Piece<Format>>& pieces) {
    return Py_BuildValue("{s:N,s:N,s:N,s:N,s:L,s:i,s:N,s:N}", "targets", joined(pieces, &Format::targets), "lengths",
                         joined(pieces, &Format::lengths), "indices", joined(pieces, &Format::indices), "values",
                         joined(pieces, &Format::values), "lines", static_cast<long long>(lines_of(pieces)), "largest",
                         largest_of(pieces, &Format::largest), "unsorted", oddity(text, pieces, &Format::unsorted),
                         "repeated", oddity(text, pieces, &Format::repeated));
  });
}

PyObject* libsvm(PyObject*, PyObject* arguments) {
  Text text;
  int threads, wide;
  if (!PyArg_ParseTuple(arguments, "y*ip", &text.view, &threads, &wide) || !check_threads(threads)) return nullptr;
  return wide ? libsvm_of<double>(text, threads) : libsvm_of<float>(text, threads);
}

// Gives the entries before a piece's first heading the item of the piece before; returns an entry that has none.
template <class Value>
const char* give_items(std::vector<Piece<Ratings<Value>>>& pieces) {
  int32_t item = Ratings<Value>::unknown;
  for (auto& piece : pieces) {
    auto& format = piece.format;
    for (int32_t& each : format.items) {
      if (each != Ratings<Value>::unknown) break;
      each = item;
    }
    if (!format.items.empty() && format.items.front() == Ratings<Value>::unknown) return format.first_entry;
    if (format.item != Ratings<Value>::unknown) item = format.item;
  }
  pieces.back().format.item = item;
  return nullptr;
}

template <class Value>
PyObject* ratings_of(const Text& text, int threads, bool by_item, int item) {
  using Format = Ratings<Value>;
  Format begun;
  begun.by_item = by_item;
  return read_text(text, threads, begun, [&](std::vector<Piece<Format>>& pieces) -> PyObject* {
    if (by_item) {
      Piece<Format> before{begun, 0, {}, false};
      before.format.item = item;
      pieces.insert(pieces.begin(), before);
      if (const char* lost = give_items(pieces); lost != nullptr)
        return Py_BuildValue("{s:n,s:s}", "offset", static_cast<Py_ssize_t>(lost - text.begin()), "wanted",
                             "a line with an item and a colon before its ratings");
    }
    return Py_BuildValue("{s:N,s:N,s:N,s:L,s:i,s:i,s:i}", "users", joined(pieces, &Format::users), "items",
                         joined(pieces, &Format::items), "values", joined(pieces, &Format::values), "lines",
                         static_cast<long long>(lines_of(pieces)), "largest_user",
                         largest_of(pieces, &Format::largest_user), "largest_item",
                         largest_of(pieces, &Format::largest_item), "item", pieces.back().format.item);
  });
}

PyObject* ratings(PyObject*, PyObject* arguments) {
  Text text;
  int threads, wide, by_item, item;
  if (!PyArg_ParseTuple(arguments, "y*ippi", &text.view, &threads, &wide, &by_item, &item) || !check_threads(threads))
    return nullptr;
  return wide ? ratings_of<double>(text, threads, by_item != 0, item)
              : ratings_of<float>(text, threads, by_item != 0, item);
}

PyObject* dimacs(PyObject*, PyObject* arguments) {
  Text text;
  long long nodes, arcs, source, sink;
  if (!PyArg_ParseTuple(arguments, "y*LLLL", &text.view, &nodes, &arcs, &source, &sink)) return nullptr;
  Dimacs begun;
  begun.nodes = nodes, begun.arcs = arcs, begun.source = source, begun.sink = sink;
  return read_text(text, 1, begun, [&](const std::vector<Piece<Dimacs>>& pieces) {
    const Dimacs& read = pieces.front().format;
    return Py_BuildValue("{s:N,s:N,s:N,s:L,s:L,s:L,s:L,s:L}", "tails", joined(pieces, &Dimacs::tails), "heads",
                         joined(pieces, &Dimacs::heads), "capacities", joined(pieces, &Dimacs::capacities), "lines",
                         static_cast<long long>(lines_of(pieces)), "nodes", static_cast<long long>(read.nodes), "arcs",
                         static_cast<long long>(read.arcs), "source", static_cast<long long>(read.source), "sink",
                         static_cast<long long>(read.sink));
  });
}

PyMethodDef functions[] = {{"libsvm", libsvm, METH_VARARGS, nullptr},
                           {"ratings", ratings, METH_VARARGS, nullptr},
                           {"dimacs", dimacs, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

PyModuleDef module{PyModuleDef_HEAD_INIT, "paceline.native._readers", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__readers() { return PyModule_Create(&module); }
