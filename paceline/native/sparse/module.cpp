// The Python face of the sparse problems: addresses come in as integers, and the interpreter's lock is free while
// anything runs.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <memory>
#include <new>

#include "problem.h"

namespace {

using namespace paceline::sparse;

PyObject* usage_error;
PyTypeObject* problem_type;

struct ProblemObject {
  PyObject_HEAD
  std::unique_ptr<Problem> problem;
};

template <class T>
T* at(unsigned long long address) { return reinterpret_cast<T*>(address); }

Problem& problem_of(PyObject* self) { return *reinterpret_cast<ProblemObject*>(self)->problem; }

// The lock is given away; ``must_stop`` takes it back for a moment.
struct Unlocked {
  Unlocked() : thread(PyEval_SaveThread()) {}
  ~Unlocked() noexcept(false) { PyEval_RestoreThread(thread); }

  // Handles signals and asks ``stop``; an exception of either ends the run too.
  static bool must_stop(void* self) {
    auto& unlocked = *static_cast<Unlocked*>(self);
    PyEval_RestoreThread(unlocked.thread);
    const bool stopped = PyErr_CheckSignals() != 0 || unlocked.asked_to_stop();
    unlocked.thread = PyEval_SaveThread();
    return stopped;
  }

  bool asked_to_stop() const {
    if (stop == nullptr || stop == Py_None) return false;
    PyObject* answer = PyObject_CallObject(stop, nullptr);
    const bool asked = answer == nullptr || PyObject_IsTrue(answer) != 0;
    Py_XDECREF(answer);
    return asked;
  }

  PyThreadState* thread;
  PyObject* stop = nullptr;  // borrowed
};

// Calls ``work`` without the lock; false if it failed and an exception is set.
template <class Work>
bool run_unlocked(Work&& work) {
  std::string refused, failed;
  {
    Unlocked unlocked;
    try {
      work(unlocked);
    } catch (const Refused& error) {
      refused = error.what();
    } catch (const std::exception& error) {
      failed = error.what();
    }
  }
  if (PyErr_Occurred()) return false;
  if (!refused.empty()) PyErr_SetString(usage_error, refused.c_str());
  if (!failed.empty()) PyErr_SetString(PyExc_MemoryError, failed.c_str());
  return refused.empty() && failed.empty();
}

template <class Make>
PyObject* make_problem(Make&& make) {
  std::unique_ptr<Problem> problem;
  if (!run_unlocked([&](Unlocked&) { problem = make(); })) return nullptr;
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(problem_type, Py_tp_alloc));
  PyObject* object = allocate(problem_type, 0);
  if (object == nullptr) return nullptr;
  new (&reinterpret_cast<ProblemObject*>(object)->problem) std::unique_ptr<Problem>(std::move(problem));
  return object;
}

bool read_parameters(PyObject* addresses, Parameters& parameters) {
  const Py_ssize_t count = PySequence_Size(addresses);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(addresses, i);
    if (item == nullptr) return false;
    parameters.push_back(static_cast<char*>(PyLong_AsVoidPtr(item)));
    Py_DECREF(item);
  }
  return !PyErr_Occurred();
}

// The outcome is written also if a signal handler raised: the updates were made.
PyObject* run(PyObject* self, PyObject* arguments) {
  PyObject *addresses, *stop;
  int scheme;
  unsigned long long order, outcome_address;
  Settings settings;
  Parameters parameters;
  long long batch, watch, epoch, start, end;
  if (!PyArg_ParseTuple(arguments, "OiiLLdLdKLLKO", &addresses, &scheme, &settings.threads, &batch, &watch, &settings.rate,
                        &epoch, &settings.delay, &order, &start, &end, &outcome_address, &stop) ||
      !read_parameters(addresses, parameters))
    return nullptr;
  settings.scheme = static_cast<Scheme>(scheme);
  settings.batch = batch, settings.watch = watch, settings.epoch = epoch, settings.start = start, settings.end = end;
  settings.order = at<const uint32_t>(order);
  if (settings.threads < 1 || settings.threads > max_threads || batch < 0 || start < 0 || start > end ||
      end > problem_of(self).items()) {
    PyErr_Format(usage_error, "wanted 1 to %d threads and a part of the order, got %d, from %lld to %lld", max_threads,
                 settings.threads, start, end);
    return nullptr;
  }
  Outcome outcome;
  const bool fine = run_unlocked([&](Unlocked& unlocked) {
    unlocked.stop = stop;
    settings.interrupted = Unlocked::must_stop;
    settings.context = &unlocked;
    problem_of(self).run(parameters, settings, outcome);
  });
  auto* const numbers = at<double>(outcome_address);
  const double written[] = {static_cast<double>(outcome.updates), static_cast<double>(outcome.sampled),
                            static_cast<double>(outcome.lost),    outcome.overwritten,
                            static_cast<double>(outcome.rounds),  static_cast<double>(outcome.waited)};
  for (size_t i = 0; i < sizeof written / sizeof *written; ++i) numbers[i] = written[i];
  if (!fine) return nullptr;
  Py_RETURN_NONE;
}

PyObject* judge(PyObject* self, PyObject* arguments) {
  PyObject* addresses;
  int threads;
  Parameters parameters;
  if (!PyArg_ParseTuple(arguments, "Oi", &addresses, &threads) || !read_parameters(addresses, parameters)) return nullptr;
  Judged judged;
  if (!run_unlocked([&](Unlocked&) { judged = problem_of(self).judge(parameters, threads); })) return nullptr;
  return Py_BuildValue("dd", judged.loss, judged.error);
}

PyObject* describe(PyObject* self, PyObject* arguments) {
  long long budget;
  if (!PyArg_ParseTuple(arguments, "L", &budget)) return nullptr;
  Described described;
  if (!run_unlocked([&](Unlocked&) { described = problem_of(self).describe(budget); })) return nullptr;
  return Py_BuildValue("LLLN", static_cast<long long>(described.omega), static_cast<long long>(described.busiest),
                       static_cast<long long>(described.intersecting), PyBool_FromLong(described.exact));
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<ProblemObject*>(self)->problem.~unique_ptr();
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* linear(PyObject*, PyObject* arguments) {
  int doubles, wide, wide_starts, loss, intercept;
  long long rows, columns, entries;
  unsigned long long starts, indices, values, targets, weights;
  double regulariser;
  if (!PyArg_ParseTuple(arguments, "pppLLLKKKKKidp", &doubles, &wide, &wide_starts, &rows, &columns, &entries, &starts,
                        &indices, &values, &targets, &weights, &loss, &regulariser, &intercept))
    return nullptr;
  const LinearData data{rows, columns, entries, at<void>(starts), wide_starts != 0, at<void>(indices), at<void>(values),
                        at<void>(targets), at<void>(weights), static_cast<Loss>(loss), regulariser, intercept != 0};
  return make_problem([&] { return make_linear(data, doubles, wide); });
}

PyObject* completion(PyObject*, PyObject* arguments) {
  int doubles, wide;
  long long entries, rows, columns, rank;
  unsigned long long row, column, values;
  double regulariser;
  if (!PyArg_ParseTuple(arguments, "ppLLLLKKKd", &doubles, &wide, &entries, &rows, &columns, &rank, &row, &column, &values,
                        &regulariser))
    return nullptr;
  const CompletionData data{entries, rows, columns, rank, at<void>(row), at<void>(column), at<void>(values), regulariser};
  return make_problem([&] { return make_completion(data, doubles, wide); });
}

PyObject* cut(PyObject*, PyObject* arguments) {
  int doubles, wide;
  long long edges, nodes, ways;
  unsigned long long tail, head, weights, fixed;
  if (!PyArg_ParseTuple(arguments, "ppLLLKKKK", &doubles, &wide, &edges, &nodes, &ways, &tail, &head, &weights, &fixed))
    return nullptr;
  const CutData data{edges, nodes, ways, at<void>(tail), at<void>(head), at<void>(weights), at<uint8_t>(fixed)};
  return make_problem([&] { return make_cut(data, doubles, wide); });
}

PyObject* shuffle_order(PyObject*, PyObject* arguments) {
  unsigned long long order, seed;
  long long count;
  if (!PyArg_ParseTuple(arguments, "KLK", &order, &count, &seed)) return nullptr;
  if (!run_unlocked([&](Unlocked&) { shuffle(at<uint32_t>(order), count, seed); })) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"run", run, METH_VARARGS, nullptr},
                         {"judge", judge, METH_VARARGS, nullptr},
                         {"describe", describe, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyMethodDef functions[] = {{"linear", linear, METH_VARARGS, nullptr},
                           {"completion", completion, METH_VARARGS, nullptr},
                           {"cut", cut, METH_VARARGS, nullptr},
                           {"shuffle", shuffle_order, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)}, {Py_tp_methods, methods}, {0, nullptr}};
PyType_Spec spec{"paceline.native._sparse.Problem", sizeof(ProblemObject), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
PyModuleDef module{PyModuleDef_HEAD_INIT, "paceline.native._sparse", nullptr, -1, functions, nullptr, nullptr, nullptr,
                   nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__sparse() {
  PyObject* errors = PyImport_ImportModule("paceline.errors");
  if (errors == nullptr) return nullptr;
  usage_error = PyObject_GetAttrString(errors, "UsageError");
  Py_DECREF(errors);
  problem_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  PyObject* created = PyModule_Create(&module);
  if (usage_error == nullptr || problem_type == nullptr || created == nullptr) return nullptr;
  if (PyModule_AddIntConstant(created, "MAX_THREADS", max_threads) != 0) return nullptr;
  return PyModule_AddType(created, problem_type) == 0 ? created : nullptr;
}
