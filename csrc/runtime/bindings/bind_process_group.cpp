#include <pybind11/chrono.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <functional>

#include "commhook/hook_result.h"
#include "runtime/bindings/bindings.h"
#include "runtime/process_group/backends.h"
#include "runtime/process_group/override_method.h"
#include "runtime/process_group/py_process_group.h"
#include "runtime/process_group/py_work.h"
#include "runtime/python/hook_names.h"
#include "runtime/python/main_thread.h"

namespace py = pybind11;

namespace commhook {
namespace {

py::dict names_by_method(const std::map<std::string, const PyMethod*>& methods) {
  py::dict names;
  for (const auto& [name, method] : methods) {
    names[py::str(name)] = method->names();
  }
  return names;
}

const PyMethod& method_named(const std::map<std::string, const PyMethod*>& methods,
                             const std::string& name) {
  for (const auto& [cpp_name, method] : methods) {
    for (const char* each : method->names()) {
      if (name == each) {
        return *method;
      }
    }
  }
  TORCH_CHECK_VALUE(false, "torch_commhook: no method that C++ calls is named ", name);
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Calls callback(end, error) once a Future is complete, on the thread that completes it.
void on_completion(const std::shared_ptr<torch::jit::PythonFutureWrapper>& future,
                   const py::function& callback) {
  const auto held = std::make_shared<MainThreadRef>(callback);
  py::gil_scoped_release no_gil;
  future->fut->addCallback([held](c10::ivalue::Future& done) {
    const double end = steady_seconds();  // before the thread waits for the GIL
    if (!interpreter_is_running()) {
      return;
    }
    py::gil_scoped_acquire gil;
    try {
      const auto error = error_of(done);
      held->get()(end, error ? python_exception(error) : py::none());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable(held->get());
    }
  });
}

// A Work for a Future, since a Python method may return a Future too.
py::object as_work(py::object result) {
  static PyTypeObject* const future_type =
      py::detail::get_type_info(typeid(torch::jit::PythonFutureWrapper))->type;
  if (!PyObject_TypeCheck(result.ptr(), future_type)) {
    return result;
  }
  return py::cast(work_of(result.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut));
}

uint64_t completion_key(const py::object& work) {
  const auto cpp = work.cast<c10::intrusive_ptr<c10d::Work>>();
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
  return held_work(cpp, work)->getCompletionKey();
#else
  return reinterpret_cast<uint64_t>(cpp.get());
#endif
}

py::object work_exception(const py::object& work) {
  const auto error = held_work(work.cast<c10::intrusive_ptr<c10d::Work>>(), work)->exception();
  return error ? python_exception(error) : py::none();
}

// Asks a Work as C++ does, for tests: PyTorch does not bind all of its methods.
py::object ask_work(const py::object& work, const std::string& name) {
  const auto held = held_work(work.cast<c10::intrusive_ptr<c10d::Work>>(), work);
  const std::map<std::string, std::function<py::object()>> questions{
      {"is_completed", [&] { return py::cast(held->isCompleted()); }},
      {"is_success", [&] { return py::cast(held->isSuccess()); }},
      {"exception", [&] { return work_exception(work); }},
      {"source_rank", [&] { return py::cast(held->sourceRank()); }},
      {"result", [&] { return py::cast(held->result()); }},
      {"synchronize", [&] { return held->synchronize(), py::none(); }},
      {"wait", [&] { return py::cast(held->wait()); }},
      {"block_current_stream", [&] { return held->blockCurrentStream(), py::none(); }},
      {"abort", [&] { return held->abort(), py::none(); }},
      {"get_future",
       [&] {
         return py::cast(std::make_shared<torch::jit::PythonFutureWrapper>(held->getFuture()));
       }},
      {"get_future_result",
       [&] {
         return py::cast(
             std::make_shared<torch::jit::PythonFutureWrapper>(held->getFutureResult()));
       }},
      {"get_duration", [&] { return py::cast(held->getDuration()); }},
      {"get_sequence_number", [&] { return py::cast(held->getSequencenumber()); }},
#if COMMHOOK_TORCH_AT_LEAST(2, 14)
      {"get_timeout", [&] { return py::cast(held->getTimeout()); }},
#endif
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
      {"get_completion_key", [&] { return py::cast(held->getCompletionKey()); }},
#endif
  };
  return questions.at(name)();
}

// Python may call a method of an object before its __init__ has run. pybind11 then gives the method
// uninitialised memory; with this it raises an exception. It checks the class that bound the
// method, which may be PyTorch's.
template <typename T>
void refuse_before_init() {
  py::detail::get_type_info(typeid(T))->operator_new = [](size_t) -> void* {
    throw py::type_error("torch_commhook: super().__init__() must be called first");
  };
}

void bind_group_and_work(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<PyProcessGroup, c10d::ProcessGroup, c10::intrusive_ptr<PyProcessGroup>>(
      m, "ProcessGroup", "A process group whose methods a Python class defines.")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("size"))
      .def(py::init<const c10::intrusive_ptr<c10d::Store>&, int, int>(), py::arg("store"),
           py::arg("rank"), py::arg("size"))
      .def_property("_hooked", &PyProcessGroup::hooked, &PyProcessGroup::set_hooked,
                    "Whether hooks are registered, which Python keeps.");
  py::class_<PyWork, c10d::Work, c10::intrusive_ptr<PyWork>>(m, "Work",
                                                             "Work that a Python class does.")
      .def(py::init<int, c10d::OpType>(), py::arg("rank") = -1,
           py::arg("op_type") = c10d::OpType::UNKNOWN)
      .def("_mark_completed", &PyWork::mark_completed, no_gil)
      .def("abort", &PyWork::abort, no_gil)
      .def("synchronize", &PyWork::synchronize, no_gil)
      .def("exception",
           [](const PyWork& work) -> py::object {
             const auto error = work.exception();
             return error ? python_exception(error) : py::none();
           })
      .def("get_future_result",
           [](PyWork& work) {
             return std::make_shared<torch::jit::PythonFutureWrapper>(work.getFutureResult());
           })
      .def("get_duration", &PyWork::getDuration, no_gil)
      .def("get_sequence_number", &PyWork::getSequencenumber, no_gil);
  refuse_before_init<PyProcessGroup>();
  refuse_before_init<PyWork>();
  refuse_before_init<c10d::ProcessGroup>();
  refuse_before_init<c10d::Work>();
}

// Bindings for Python classes of groups and works.
void bind_overrides(py::module_& m) {
  m.def("process_group_methods", [] { return names_by_method(PyProcessGroup::methods()); });
  m.def("work_methods", [] { return names_by_method(PyWork::methods()); });
  m.def(
      "group_method",
      [](const py::function& function, const std::string& name) {
        return override_method(
            function, method_named(PyProcessGroup::methods(), name),
            [](PyObject* object) -> OverrideTarget {
              const auto* const group = cpp_object<PyProcessGroup>(object);
              return {group, group != nullptr && group->hooked()};
            },
            as_work);
      },
      py::arg("function"), py::arg("name"),
      "What a class of process groups has for a method that C++ calls.");
  m.def(
      "work_method",
      [](const py::function& function, const std::string& name) {
        return override_method(
            function, method_named(PyWork::methods(), name),
            [](PyObject* object) -> OverrideTarget { return {cpp_object<PyWork>(object), false}; },
            [](py::object result) { return result; });
      },
      py::arg("function"), py::arg("name"),
      "What a class of works has for a method that C++ calls.");
  m.def("set_run_with_hooks", &set_run_with_hooks, py::arg("run"));
}

// For any group.
void bind_backends(py::module_& m) {
  m.def(
      "has_compiled_backend",
      [](c10d::ProcessGroup& group, const at::Device& device) {
        return has_compiled_backend(group, device.type());
      },
      py::arg("group"), py::arg("device"));
}

// Bindings for any Work, including PyTorch's.
void bind_works(py::module_& m) {
  m.def("on_completion", &on_completion, py::arg("future"), py::arg("callback"),
        "Calls callback(end, error) once a Future is complete; end in steady_seconds().");
  m.def("completion_key", &completion_key, py::arg("work"),
        "What c10d knows a Work by when it has completed.");
  m.def("as_work", &as_work, py::arg("value"), "The Work of a Future; anything else as it is.");
  m.def("work_exception", &work_exception, py::arg("work"),
        "What a Work has failed with, or None. PyTorch's binding cannot convert it up to 2.12.");
  m.def("ask_work", &ask_work, py::arg("work"), py::arg("name"));
  // Wraps a Python Work as C++ does. For tests, which have no other way to do this.
  m.def(
      "held_work",
      [](const py::object& work) {
        return held_work(work.cast<c10::intrusive_ptr<c10d::Work>>(), work);
      },
      py::arg("work"));
}

// Bindings for Python code that C++ threads run.
void bind_for_threads(py::module_& m) {
  m.def(
      "report_unraisable",
      [](const py::object& error, const py::object& where) {
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
        PyErr_WriteUnraisable(where.ptr());
      },
      py::arg("error"), py::arg("where"),
      "Shows an exception that has nobody to go to, by sys.unraisablehook.");
  m.def(
      "drop_on_main_thread",
      [](const py::object& object, const std::string& attribute) {
        const py::dict attributes = object.attr("__dict__");
        if (attributes.contains(attribute)) {
          py::object value = attributes[attribute.c_str()];
          attributes.attr("__delitem__")(attribute);
          drop_on_main_thread(std::move(value));  // this thread's only reference
        }
      },
      py::arg("object"), py::arg("attribute"),
      "Takes an attribute from an object and drops it on the main thread, when that runs Python "
      "next; at once where this is it.");
  m.def("steady_seconds", &steady_seconds, "A clock that only goes forward.");
}

}  // namespace

void bind_process_group(py::module_& m) {
  bind_group_and_work(m);
  bind_overrides(m);
  bind_backends(m);
  bind_works(m);
  bind_for_threads(m);
}

}  // namespace commhook
