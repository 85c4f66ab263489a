#include <ATen/record_function.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "runtime/bindings/bindings.h"
#include "runtime/profiling/span.h"

namespace py = pybind11;

namespace commhook {
namespace {

// A guard for Python's `with`: entered and left once, on one thread.
class ProfilerUse {
 public:
  explicit ProfilerUse(std::shared_ptr<const ThreadProfiler> profiler)
      : profiler_(std::move(profiler)) {}

  void enter() { guard_.emplace(*profiler_); }
  void leave() { guard_.reset(); }

 private:
  const std::shared_ptr<const ThreadProfiler> profiler_;
  std::optional<ThreadProfiler::Guard> guard_;
};

}  // namespace

void bind_profiling(py::module_& m) {
  // Calls a function that PyTorch's profiler does not see.
  m.def(
      "unseen",
      [](const py::function& function) {
        const at::DisableRecordFunctionGuard guard;
        return function();
      },
      py::arg("function"));
  py::class_<ProfilerUse>(m, "ProfilerUse")
      .def("__enter__", &ProfilerUse::enter)
      .def("__exit__", [](ProfilerUse& use, const py::args&) { use.leave(); });
  // pybind11 cannot hold pointers to const objects.
  py::class_<ThreadProfiler, std::shared_ptr<ThreadProfiler>>(m, "ThreadProfiler")
      .def_static("current",
                  [] { return std::const_pointer_cast<ThreadProfiler>(ThreadProfiler::current()); })
      .def("use", [](const std::shared_ptr<ThreadProfiler>& profiler) {
        return std::make_unique<ProfilerUse>(profiler);
      });
  py::class_<Span, std::shared_ptr<Span>>(m, "Span")
      .def(py::init<std::shared_ptr<ThreadProfiler>, const std::string&, bool>(),
           py::arg("profiler"), py::arg("name"), py::arg("is_async"))
      .def("end", &Span::end, py::call_guard<py::gil_scoped_release>())
      .def(
          "end_with",
          [](const std::shared_ptr<Span>& span,
             const std::shared_ptr<torch::jit::PythonFutureWrapper>& future) {
            end_with(span, *future->fut);
          },
          py::arg("future"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace commhook
