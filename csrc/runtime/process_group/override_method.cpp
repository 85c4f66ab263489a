#include "runtime/process_group/override_method.h"

#include <structmember.h>

#include <utility>

namespace py = pybind11;

namespace commhook {
namespace {

struct OverrideMethod {
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  PyObject* function;
  const PyMethod* method;
  FindTarget find;
  ConvertResult convert;
  PyObject* without_hooks;  // the variant that the hooks wrap; null in that variant
};

PyObject* run_hooks = nullptr;  // never dropped

OverrideMethod* as_method(PyObject* object) { return reinterpret_cast<OverrideMethod*>(object); }

PyObject* call_with_hooks(const OverrideMethod& self, PyObject* const* arguments, size_t count,
                          PyObject* keyword_names) {
  try {
    py::tuple positional(count);
    for (size_t i = 0; i < count; ++i) {
      positional[i] = py::reinterpret_borrow<py::object>(arguments[i]);
    }
    py::dict keywords;
    const Py_ssize_t named = keyword_names == nullptr ? 0 : PyTuple_GET_SIZE(keyword_names);
    for (Py_ssize_t i = 0; i < named; ++i) {
      keywords[py::handle(PyTuple_GET_ITEM(keyword_names, i))] =
          py::reinterpret_borrow<py::object>(arguments[count + static_cast<size_t>(i)]);
    }
    const auto function = py::reinterpret_borrow<py::object>(self.without_hooks);
    return run_with_hooks(arguments[0], *self.method, function, positional, keywords)
        .release()
        .ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyObject* call(PyObject* callable, PyObject* const* arguments, size_t flags,
               PyObject* keyword_names) {
  const OverrideMethod& self = *as_method(callable);
  const auto count = static_cast<size_t>(PyVectorcall_NARGS(flags));
  const OverrideTarget target = count == 0 ? OverrideTarget{} : self.find(arguments[0]);
  if (target.self == nullptr) {  // the function reports this error
    return PyObject_Vectorcall(self.function, arguments, flags, keyword_names);
  }
  if (target.hooked && self.without_hooks != nullptr &&
      !detail::ActiveOverride::exists(target.self, *self.method)) {
    return call_with_hooks(self, arguments, count, keyword_names);
  }
  const detail::ActiveOverride active(target.self, *self.method);
  PyObject* const result = PyObject_Vectorcall(self.function, arguments, flags, keyword_names);
  if (result == nullptr) {
    return nullptr;
  }
  try {
    return self.convert(py::reinterpret_steal<py::object>(result)).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* bind(PyObject* self, PyObject* object, PyObject* /*type*/) {
  return object == nullptr ? Py_NewRef(self) : PyMethod_New(self, object);
}

// Shares only the function's name, documentation and signature. With more attributes of a function,
// or if it wrapped one, Dynamo would take it for a function and forget `self`.
PyObject* get_attribute(PyObject* self, PyObject* name) {
  PyObject* const function = as_method(self)->function;
  if (PyUnicode_CompareWithASCIIString(name, "__func__") == 0) {
    return Py_NewRef(function);
  }
  for (const char* shared :
       {"__name__", "__qualname__", "__module__", "__doc__", "__annotations__"}) {
    if (PyUnicode_CompareWithASCIIString(name, shared) == 0) {
      return PyObject_GetAttr(function, name);
    }
  }
  return PyObject_GenericGetAttr(self, name);
}

PyObject* represent(PyObject* self) { return PyObject_Repr(as_method(self)->function); }

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(as_method(self)->function);
  Py_VISIT(as_method(self)->without_hooks);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(as_method(self)->function);
  Py_CLEAR(as_method(self)->without_hooks);
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyTypeObject* make_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(OverrideMethod, vectorcall), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
                                {Py_tp_getattro, reinterpret_cast<void*>(get_attribute)},
                                {Py_tp_repr, reinterpret_cast<void*>(represent)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec{"torch_commhook._C.OverrideMethod", sizeof(OverrideMethod), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                              Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                          slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

PyTypeObject* method_type() {
  static PyTypeObject* const type = make_type();
  return type;
}

py::object make_method(const py::function& function, const PyMethod& method, FindTarget find,
                       ConvertResult convert, py::object without_hooks) {
  auto* const self = PyObject_GC_New(OverrideMethod, method_type());
  if (self == nullptr) {
    throw py::error_already_set();
  }
  self->vectorcall = call;
  self->function = Py_NewRef(function.ptr());
  self->method = &method;
  self->find = find;
  self->convert = convert;
  self->without_hooks = without_hooks.release().ptr();
  PyObject_GC_Track(self);
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

}  // namespace

py::object override_method(const py::function& function, const PyMethod& method, FindTarget find,
                           ConvertResult convert) {
  py::object plain = make_method(function, method, find, convert, py::object());
  return make_method(function, method, find, convert, std::move(plain));
}

bool is_override_method(PyObject* attribute) { return Py_IS_TYPE(attribute, method_type()); }

void set_run_with_hooks(py::object run) {
  Py_XDECREF(run_hooks);
  run_hooks = run.release().ptr();
}

py::object run_with_hooks(const py::handle& object, const PyMethod& method,
                          const py::object& function, const py::tuple& arguments,
                          const py::dict& keywords) {
  return py::handle(run_hooks)(object, method.names().front(), function, arguments, keywords);
}

}  // namespace commhook
