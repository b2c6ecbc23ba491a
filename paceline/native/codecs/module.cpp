// The Python face of the codecs' loops: addresses come in as integers, and the interpreter's lock is free meanwhile.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "codecs.h"

namespace {

using namespace paceline::codecs;
using Address = unsigned long long;

template <class T>
T* at(Address address) { return reinterpret_cast<T*>(address); }

// Frees the interpreter's lock while it lives.
class Unlocked {
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  // Python ends daemon threads here when the interpreter ends, by unwinding their stack.
  ~Unlocked() noexcept(false) { PyEval_RestoreThread(thread_); }

 private:
  PyThreadState* thread_;
};

template <class Work>
auto without_lock(Work work) {
  const Unlocked unlocked;
  return work();
}

template <class T>
PyObject* pair(const std::pair<T, T>& both) {
  return Py_BuildValue("KK", static_cast<Address>(both.first), static_cast<Address>(both.second));
}

PyObject* sums_of_words(PyObject*, PyObject* arguments) {
  Address words, count;
  if (!PyArg_ParseTuple(arguments, "KK", &words, &count)) return nullptr;
  return pair(without_lock([&] { return sums(at<uint32_t>(words), count); }));
}

PyObject* bits_of_largest(PyObject*, PyObject* arguments) {
  Address values, count;
  if (!PyArg_ParseTuple(arguments, "KK", &values, &count)) return nullptr;
  return PyLong_FromUnsignedLong(without_lock([&] { return largest_bits(at<float>(values), count); }));
}

PyObject* to_levels(PyObject*, PyObject* arguments) {
  Address values, count, bucket, norms, codes;
  int levels, two_norm, packed;
  unsigned int first, second;
  if (!PyArg_ParseTuple(arguments, "KKKipIIKKp", &values, &count, &bucket, &levels, &two_norm, &first, &second, &norms,
                        &codes, &packed))
    return nullptr;
  const Rounding how{static_cast<size_t>(bucket), levels, two_norm != 0, {first, second}};
  without_lock([&] { round_to_levels(at<float>(values), count, how, at<float>(norms), at<uint8_t>(codes), packed); });
  Py_RETURN_NONE;
}

PyObject* from_levels(PyObject*, PyObject* arguments) {
  Address norms, codes, count, bucket, out;
  int levels, packed, add;
  if (!PyArg_ParseTuple(arguments, "KKKKipKp", &norms, &codes, &count, &bucket, &levels, &packed, &out, &add))
    return nullptr;
  without_lock([&] {
    values_of_levels(at<float>(norms), at<uint8_t>(codes), count, bucket, levels, packed, at<float>(out), add);
  });
  Py_RETURN_NONE;
}

PyObject* values_to_fp8(PyObject*, PyObject* arguments) {
  Address values, count, bucket, scales, codes;
  if (!PyArg_ParseTuple(arguments, "KKKKK", &values, &count, &bucket, &scales, &codes)) return nullptr;
  without_lock([&] { to_fp8(at<float>(values), count, bucket, at<float>(scales), at<uint8_t>(codes)); });
  Py_RETURN_NONE;
}

PyObject* values_from_fp8(PyObject*, PyObject* arguments) {
  Address scales, codes, count, bucket, out;
  int add;
  if (!PyArg_ParseTuple(arguments, "KKKKKp", &scales, &codes, &count, &bucket, &out, &add)) return nullptr;
  without_lock([&] { from_fp8(at<float>(scales), at<uint8_t>(codes), count, bucket, at<float>(out), add); });
  Py_RETURN_NONE;
}

PyObject* pack_codes(PyObject*, PyObject* arguments) {
  Address codes, count, out;
  int width;
  if (!PyArg_ParseTuple(arguments, "KKiK", &codes, &count, &width, &out)) return nullptr;
  without_lock([&] { pack(at<uint8_t>(codes), count, width, at<uint8_t>(out)); });
  Py_RETURN_NONE;
}

PyObject* unpack_codes(PyObject*, PyObject* arguments) {
  Address data, count, codes;
  int width;
  if (!PyArg_ParseTuple(arguments, "KKiK", &data, &count, &width, &codes)) return nullptr;
  without_lock([&] { unpack(at<uint8_t>(data), count, width, at<uint8_t>(codes)); });
  Py_RETURN_NONE;
}

PyObject* to_elias(PyObject*, PyObject* arguments) {
  Address codes, count, out;
  int levels;
  if (!PyArg_ParseTuple(arguments, "KKiK", &codes, &count, &levels, &out)) return nullptr;
  return pair(without_lock([&] { return write_elias(at<uint8_t>(codes), count, levels, at<uint8_t>(out)); }));
}

PyObject* from_elias(PyObject*, PyObject* arguments) {
  Address data, bytes, coded, count, codes;
  int levels;
  if (!PyArg_ParseTuple(arguments, "KKKKiK", &data, &bytes, &coded, &count, &levels, &codes)) return nullptr;
  return PyBool_FromLong(without_lock(
      [&] { return read_elias(at<uint8_t>(data), bytes, coded, count, levels, at<uint8_t>(codes)); }));
}

PyObject* to_signs(PyObject*, PyObject* arguments) {
  Address values, residual, count, bucket, means, signs;
  if (!PyArg_ParseTuple(arguments, "KKKKKK", &values, &residual, &count, &bucket, &means, &signs)) return nullptr;
  without_lock([&] {
    write_signs(at<float>(values), at<float>(residual), count, bucket, at<float>(means), at<uint8_t>(signs));
  });
  Py_RETURN_NONE;
}

PyObject* from_signs(PyObject*, PyObject* arguments) {
  Address means, signs, count, bucket, out;
  int add;
  if (!PyArg_ParseTuple(arguments, "KKKKKp", &means, &signs, &count, &bucket, &out, &add)) return nullptr;
  without_lock([&] { read_signs(at<float>(means), at<uint8_t>(signs), count, bucket, at<float>(out), add); });
  Py_RETURN_NONE;
}

PyObject* indices_at_least(PyObject*, PyObject* arguments) {
  Address values, count, indices;
  float least;
  if (!PyArg_ParseTuple(arguments, "KKfK", &values, &count, &least, &indices)) return nullptr;
  return PyLong_FromSize_t(
      without_lock([&] { return at_least(at<float>(values), count, least, at<int32_t>(indices)); }));
}

PyObject* words_beyond(PyObject*, PyObject* arguments) {
  Address values, residual, count, words;
  float tau;
  if (!PyArg_ParseTuple(arguments, "KKKfK", &values, &residual, &count, &tau, &words)) return nullptr;
  return PyLong_FromSize_t(without_lock(
      [&] { return take_beyond(at<float>(values), at<float>(residual), count, tau, at<uint32_t>(words)); }));
}

PyObject* add_at_indices(PyObject*, PyObject* arguments) {
  Address indices, values, count, out;
  if (!PyArg_ParseTuple(arguments, "KKKK", &indices, &values, &count, &out)) return nullptr;
  without_lock([&] { add_at(at<int64_t>(indices), at<float>(values), count, at<float>(out)); });
  Py_RETURN_NONE;
}

PyObject* to_gaps(PyObject*, PyObject* arguments) {
  Address indices, bits, count, low, unary;
  int shift;
  if (!PyArg_ParseTuple(arguments, "KKKiKK", &indices, &bits, &count, &shift, &low, &unary)) return nullptr;
  return PyLong_FromSize_t(without_lock([&] {
    return write_gaps(at<int64_t>(indices), at<int64_t>(bits), count, shift, at<uint8_t>(low), at<uint8_t>(unary));
  }));
}

PyObject* from_gaps(PyObject*, PyObject* arguments) {
  Address low, unary, bytes, count, total, indices, bits;
  int shift;
  if (!PyArg_ParseTuple(arguments, "KKKKiKKK", &low, &unary, &bytes, &count, &shift, &total, &indices, &bits))
    return nullptr;
  return PyBool_FromLong(without_lock([&] {
    return read_gaps(at<uint8_t>(low), at<uint8_t>(unary), bytes, count, shift, total, at<int64_t>(indices),
                     at<int64_t>(bits));
  }));
}

PyObject* orthonormal_rows(PyObject*, PyObject* arguments) {
  Address p, rank, count;
  if (!PyArg_ParseTuple(arguments, "KKK", &p, &rank, &count)) return nullptr;
  without_lock([&] { make_orthonormal(at<float>(p), rank, count); });
  Py_RETURN_NONE;
}

PyObject* outer_products(PyObject*, PyObject* arguments) {
  Address p, q, rows, columns, rank, out;
  int add;
  if (!PyArg_ParseTuple(arguments, "KKKKKKp", &p, &q, &rows, &columns, &rank, &out, &add)) return nullptr;
  without_lock([&] { add_products(at<float>(p), at<float>(q), rows, columns, rank, at<float>(out), add); });
  Py_RETURN_NONE;
}

PyObject* chosen_instruction_set(PyObject*, PyObject*) { return PyUnicode_FromString(instruction_set()); }

PyObject* choose_set(PyObject*, PyObject* arguments) {
  const char* name;
  if (!PyArg_ParseTuple(arguments, "s", &name)) return nullptr;
  return PyBool_FromLong(choose_instruction_set(name));
}

PyMethodDef functions[] = {{"sums", sums_of_words, METH_VARARGS, nullptr},
                           {"largest_bits", bits_of_largest, METH_VARARGS, nullptr},
                           {"to_levels", to_levels, METH_VARARGS, nullptr},
                           {"from_levels", from_levels, METH_VARARGS, nullptr},
                           {"to_fp8", values_to_fp8, METH_VARARGS, nullptr},
                           {"from_fp8", values_from_fp8, METH_VARARGS, nullptr},
                           {"pack", pack_codes, METH_VARARGS, nullptr},
                           {"unpack", unpack_codes, METH_VARARGS, nullptr},
                           {"to_elias", to_elias, METH_VARARGS, nullptr},
                           {"from_elias", from_elias, METH_VARARGS, nullptr},
                           {"to_signs", to_signs, METH_VARARGS, nullptr},
                           {"from_signs", from_signs, METH_VARARGS, nullptr},
                           {"at_least", indices_at_least, METH_VARARGS, nullptr},
                           {"take_beyond", words_beyond, METH_VARARGS, nullptr},
                           {"add_at", add_at_indices, METH_VARARGS, nullptr},
                           {"to_gaps", to_gaps, METH_VARARGS, nullptr},
                           {"from_gaps", from_gaps, METH_VARARGS, nullptr},
                           {"make_orthonormal", orthonormal_rows, METH_VARARGS, nullptr},
                           {"add_products", outer_products, METH_VARARGS, nullptr},
                           {"instruction_set", chosen_instruction_set, METH_NOARGS, nullptr},
                           {"choose_instruction_set", choose_set, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

PyModuleDef module{PyModuleDef_HEAD_INIT, "paceline.native._codecs", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__codecs() { return PyModule_Create(&module); }
