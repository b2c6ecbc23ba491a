// The Python face: addresses come in as integers, and the interpreter's lock is free while anything runs or waits.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>
#include <utility>

#include "group.h"

namespace {

using namespace paceline;

PyObject* comm_error;
PyTypeObject* group_type;
PyTypeObject* ticket_type;
PyTypeObject* region_type;

struct GroupObject {
  PyObject_HEAD
  std::shared_ptr<Group> group;
};

struct TicketObject {
  PyObject_HEAD
  std::shared_ptr<Group> group;
  TaskPointer task;
};

struct RegionObject {
  PyObject_HEAD
  std::shared_ptr<Region> region;
};

template <class Object>
Object* as(PyObject* self) { return reinterpret_cast<Object*>(self); }

bool is_main_thread() {
  static thread_local const bool is_main = syscall(SYS_gettid) == getpid();
  return is_main;
}

bool handle_signals() {
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return raised;
}

// While the main thread waits, signals are handled and Ctrl-C ends the wait; Python handles none on other threads.
struct Waiting {
  Waiting() {
    if (is_main_thread()) interrupted = handle_signals;
    thread = PyEval_SaveThread();
  }
  // Python ends daemon threads here when the interpreter ends, by unwinding their stack.
  ~Waiting() noexcept(false) {
    PyEval_RestoreThread(thread);
    interrupted = nullptr;
  }
  PyThreadState* thread;
};

PyObject* raise(const std::string& text) {
  if (!PyErr_Occurred()) PyErr_SetString(comm_error, text.c_str());
  return nullptr;
}

// The last reference may end threads. In a child made by fork there are none, and the mutexes may be locked for ever.
void let_go(std::shared_ptr<Group>& group) {
  if (!group) return;
  if (!group->is_usable_here()) {
    new std::shared_ptr<Group>(std::move(group));
    return;
  }
  PyThreadState* thread = PyEval_SaveThread();
  group.reset();
  PyEval_RestoreThread(thread);
}

template <class Object>
Object* make(PyTypeObject* type) {
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  return as<Object>(allocate(type, 0));
}

void release(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// Reads a sequence of addresses or sizes; None is an empty one.
template <class T>
bool read_numbers(PyObject* object, std::vector<T>& numbers, int size, const char* what) {
  if (object == Py_None) return true;
  const Py_ssize_t length = PySequence_Size(object);
  if (length < 0) return false;
  if (length != size) {
    PyErr_Format(PyExc_ValueError, "%s: wanted one per rank (%d), got %zd", what, size, length);
    return false;
  }
  for (Py_ssize_t i = 0; i < length; ++i) {
    PyObject* item = PySequence_GetItem(object, i);
    if (item == nullptr) return false;
    const unsigned long long number = PyLong_AsUnsignedLongLong(item);
    Py_DECREF(item);
    if (PyErr_Occurred()) return false;
    numbers.push_back((T)number);
  }
  return true;
}

std::shared_ptr<Group> usable(PyObject* self) {
  std::shared_ptr<Group> group = as<GroupObject>(self)->group;
  if (!group) {
    raise("the group is closed");
  } else if (!group->is_usable_here()) {
    raise("group '" + group->member.name + "' belongs to the process that this one was forked from; make a new one");
    let_go(group);
  }
  return group;
}

// Gives the task to the group: a ticket if it is to run alone, else nothing, when it is done.
PyObject* hand_over(const std::shared_ptr<Group>& group, const TaskPointer& task, bool alone) {
  std::string error;
  {
    const Waiting waiting;
    try {
      group->submit(task, alone);
      if (!alone) group->wait(task, -1);
      if (!alone) error = task->error;
    } catch (const std::exception& failure) {
      error = failure.what();
    }
  }
  if (PyErr_Occurred() || !error.empty()) return raise(error);
  if (!alone) Py_RETURN_NONE;
  auto* ticket = make<TicketObject>(ticket_type);
  if (ticket == nullptr) return nullptr;
  new (&ticket->group) std::shared_ptr<Group>(group);
  new (&ticket->task) TaskPointer(task);
  return reinterpret_cast<PyObject*>(ticket);
}

// Group ------------------------------------------------------------------------------------------------------------

PyObject* group_collective(PyObject* self, PyObject* arguments) {
  int kind, dtype, reduce, root, alone;
  unsigned long long count, input, output;
  PyObject *inputs, *outputs, *input_sizes, *output_sizes;
  if (!PyArg_ParseTuple(arguments, "iiiiKKKOOOOp", &kind, &dtype, &reduce, &root, &count, &input, &output, &inputs,
                        &outputs, &input_sizes, &output_sizes, &alone))
    return nullptr;
  const std::shared_ptr<Group> group = usable(self);
  if (!group) return nullptr;
  const auto task = std::make_shared<Task>();
  Call& call = task->call;
  call.what = {static_cast<Kind>(kind), static_cast<Dtype>(dtype), static_cast<Reduce>(reduce), root, count};
  call.input = reinterpret_cast<const char*>(input);
  call.output = reinterpret_cast<char*>(output);
  const int size = group->member.size;
  if (!read_numbers(inputs, call.inputs, size, "inputs") || !read_numbers(outputs, call.outputs, size, "outputs") ||
      !read_numbers(input_sizes, call.input_sizes, size, "input sizes") ||
      !read_numbers(output_sizes, call.output_sizes, size, "output sizes"))
    return nullptr;
  return hand_over(group, task, alone);
}

PyObject* group_message(PyObject* self, PyObject* arguments) {
  int kind, dtype, peer, alone;
  long long tag;
  unsigned long long count, address;
  if (!PyArg_ParseTuple(arguments, "iiiLKKp", &kind, &dtype, &peer, &tag, &count, &address, &alone)) return nullptr;
  const std::shared_ptr<Group> group = usable(self);
  if (!group) return nullptr;
  const auto task = std::make_shared<Task>();
  task->message = std::make_shared<Message>();
  task->message->what = {static_cast<Kind>(kind), static_cast<Dtype>(dtype), Reduce::none, -1, count};
  task->message->peer = peer;
  task->message->tag = tag;
  task->message->data = reinterpret_cast<char*>(address);
  PyObject* result = hand_over(group, task, alone);
  if (result == nullptr || alone) return result;
  Py_DECREF(result);
  return PyLong_FromLong(task->message->peer);
}

PyObject* group_allocate(PyObject* self, PyObject* arguments) {
  unsigned long long bytes;
  const char* objection;
  if (!PyArg_ParseTuple(arguments, "Ks", &bytes, &objection)) return nullptr;
  const std::shared_ptr<Group> group = usable(self);
  if (!group) return nullptr;
  const auto task = std::make_shared<Task>();
  task->call.what = {Kind::allocate, Dtype::u8, Reduce::none, -1, bytes};
  task->call.objection = objection;
  PyObject* done = hand_over(group, task, false);
  if (done == nullptr) return nullptr;
  Py_DECREF(done);
  auto* region = make<RegionObject>(region_type);
  if (region == nullptr) return nullptr;
  new (&region->region) std::shared_ptr<Region>(std::move(task->call.region));
  return reinterpret_cast<PyObject*>(region);
}

PyObject* group_close(PyObject* self, PyObject*) {
  std::shared_ptr<Group> group = std::exchange(as<GroupObject>(self)->group, nullptr);
  if (group && group->is_usable_here()) {
    PyThreadState* thread = PyEval_SaveThread();
    group->close();
    PyEval_RestoreThread(thread);
  }
  let_go(group);
  Py_RETURN_NONE;
}

void group_dealloc(PyObject* self) {
  let_go(as<GroupObject>(self)->group);
  as<GroupObject>(self)->group.~shared_ptr();
  release(self);
}

PyMethodDef group_methods[] = {{"collective", group_collective, METH_VARARGS, nullptr},
                               {"message", group_message, METH_VARARGS, nullptr},
                               {"allocate", group_allocate, METH_VARARGS, nullptr},
                               {"close", group_close, METH_NOARGS, nullptr},
                               {nullptr, nullptr, 0, nullptr}};

// Ticket -----------------------------------------------------------------------------------------------------------

PyObject* ticket_wait(PyObject* self, PyObject* arguments) {
  double seconds;
  if (!PyArg_ParseTuple(arguments, "d", &seconds)) return nullptr;
  auto* ticket = as<TicketObject>(self);
  if (!ticket->group->is_usable_here()) return raise("the ticket belongs to the process that this one was forked from");
  bool done;
  {
    const Waiting waiting;
    done = ticket->group->wait(ticket->task, seconds);
  }
  if (PyErr_Occurred()) return nullptr;
  if (done && !ticket->task->error.empty()) return raise(ticket->task->error);
  return PyBool_FromLong(done);
}

PyObject* ticket_done(PyObject* self, PyObject*) {
  auto* ticket = as<TicketObject>(self);
  if (!ticket->group->is_usable_here()) return raise("the ticket belongs to the process that this one was forked from");
  return PyBool_FromLong(ticket->group->is_done(ticket->task));
}

PyObject* ticket_source(PyObject* self, PyObject*) {
  const MessagePointer& message = as<TicketObject>(self)->task->message;
  return PyLong_FromLong(message ? message->peer : any_source);
}

void ticket_dealloc(PyObject* self) {
  auto* ticket = as<TicketObject>(self);
  ticket->task.~shared_ptr();
  let_go(ticket->group);
  ticket->group.~shared_ptr();
  release(self);
}

PyMethodDef ticket_methods[] = {{"wait", ticket_wait, METH_VARARGS, nullptr},
                                {"done", ticket_done, METH_NOARGS, nullptr},
                                {"source", ticket_source, METH_NOARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

// Region -----------------------------------------------------------------------------------------------------------

int region_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Region& region = *as<RegionObject>(self)->region;
  return PyBuffer_FillInfo(view, self, region.own(), static_cast<Py_ssize_t>(region.part_bytes), 0, flags);
}

PyObject* region_address(PyObject* self, PyObject*) { return PyLong_FromVoidPtr(as<RegionObject>(self)->region->own()); }

void region_dealloc(PyObject* self) {
  as<RegionObject>(self)->region.~shared_ptr();
  release(self);
}

PyMethodDef region_methods[] = {{"address", region_address, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

// Module -----------------------------------------------------------------------------------------------------------

PyObject* join(PyObject*, PyObject* arguments) {
  int file, rank, size, cores;
  double timeout;
  const char* name;
  PyObject *life, *number_list;
  if (!PyArg_ParseTuple(arguments, "iiiidsOO", &file, &rank, &size, &cores, &timeout, &name, &life, &number_list))
    return nullptr;
  if (size < 1 || size > max_ranks || rank < 0 || rank >= size) {
    PyErr_Format(PyExc_ValueError, "wanted 1 to %d ranks and one of them, got rank %d of %d", max_ranks, rank, size);
    return nullptr;
  }
  std::vector<int> descriptors, numbers;
  if (!read_numbers(life, descriptors, size, "life")) return nullptr;
  if (!read_numbers(number_list, numbers, size, "numbers")) return nullptr;
  auto* object = make<GroupObject>(group_type);
  if (object == nullptr) return nullptr;
  new (&object->group) std::shared_ptr<Group>();
  try {
    object->group = std::make_shared<Group>(std::make_shared<File>(file), Member{rank, size, cores, timeout, name, numbers},
                                            std::move(descriptors));
  } catch (const std::exception& failure) {
    Py_DECREF(object);
    return raise(failure.what());
  }
  return reinterpret_cast<PyObject*>(object);
}

PyObject* segment_bytes(PyObject*, PyObject* size) {
  const long ranks = PyLong_AsLong(size);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromSize_t(Segment::bytes_for(static_cast<int>(ranks)));
}

PyObject* can_reduce(PyObject*, PyObject* arguments) {
  int dtype, reduce;
  if (!PyArg_ParseTuple(arguments, "ii", &dtype, &reduce)) return nullptr;
  return PyBool_FromLong(is_defined(static_cast<Dtype>(dtype), static_cast<Reduce>(reduce)));
}

PyObject* built(const Examined& found) {
  return Py_BuildValue("NK", PyBool_FromLong(found.finite), static_cast<unsigned long long>(found.checksum));
}

PyObject* examine_memory(PyObject*, PyObject* arguments) {
  unsigned long long address, bytes;
  if (!PyArg_ParseTuple(arguments, "KK", &address, &bytes)) return nullptr;
  Examined found;
  Py_BEGIN_ALLOW_THREADS
  found = examine(reinterpret_cast<const void*>(address), bytes);
  Py_END_ALLOW_THREADS
  return built(found);
}

PyObject* copy_examined_memory(PyObject*, PyObject* arguments) {
  unsigned long long to, from, bytes;
  if (!PyArg_ParseTuple(arguments, "KKK", &to, &from, &bytes)) return nullptr;
  Examined found;
  Py_BEGIN_ALLOW_THREADS
  found = copy_examined(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  Py_END_ALLOW_THREADS
  return built(found);
}

PyObject* copy_memory(PyObject*, PyObject* arguments) {
  unsigned long long to, from, bytes;
  if (!PyArg_ParseTuple(arguments, "KKK", &to, &from, &bytes)) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  copy_past_cache(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* chosen_instruction_set(PyObject*, PyObject*) { return PyUnicode_FromString(instruction_set()); }

PyObject* choose_set(PyObject*, PyObject* arguments) {
  const char* name;
  if (!PyArg_ParseTuple(arguments, "s", &name)) return nullptr;
  return PyBool_FromLong(choose_instruction_set(name));
}

PyMethodDef functions[] = {{"join", join, METH_VARARGS, nullptr},
                           {"segment_bytes", segment_bytes, METH_O, nullptr},
                           {"can_reduce", can_reduce, METH_VARARGS, nullptr},
                           {"examine", examine_memory, METH_VARARGS, nullptr},
                           {"copy_examined", copy_examined_memory, METH_VARARGS, nullptr},
                           {"copy_past_cache", copy_memory, METH_VARARGS, nullptr},
                           {"instruction_set", chosen_instruction_set, METH_NOARGS, nullptr},
                           {"choose_instruction_set", choose_set, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

using Buffer = int (*)(PyObject*, Py_buffer*, int);

PyTypeObject* make_type(const char* name, size_t bytes, destructor dealloc, PyMethodDef* methods, Buffer buffer) {
  PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                         {Py_tp_methods, methods},
                         {buffer != nullptr ? Py_bf_getbuffer : 0, reinterpret_cast<void*>(buffer)},
                         {0, nullptr}};
  PyType_Spec spec{name, static_cast<int>(bytes), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

PyModuleDef module{PyModuleDef_HEAD_INIT, "paceline.native._core", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() {
  PyObject* errors = PyImport_ImportModule("paceline.errors");
  if (errors == nullptr) return nullptr;
  comm_error = PyObject_GetAttrString(errors, "CommError");
  Py_DECREF(errors);
  group_type = make_type("paceline.native._core.Group", sizeof(GroupObject), group_dealloc, group_methods, nullptr);
  ticket_type = make_type("paceline.native._core.Ticket", sizeof(TicketObject), ticket_dealloc, ticket_methods, nullptr);
  region_type = make_type("paceline.native._core.Region", sizeof(RegionObject), region_dealloc, region_methods, region_buffer);
  PyObject* created = PyModule_Create(&module);
  if (comm_error == nullptr || group_type == nullptr || ticket_type == nullptr || region_type == nullptr ||
      created == nullptr)
    return nullptr;
  for (PyTypeObject* type : {group_type, ticket_type, region_type})
    if (PyModule_AddType(created, type) != 0) return nullptr;
  if (PyModule_AddIntConstant(created, "PAST_CACHE_FROM", past_cache_from) != 0) return nullptr;
  return PyModule_AddIntConstant(created, "MAX_RANKS", max_ranks) == 0 ? created : nullptr;
}
