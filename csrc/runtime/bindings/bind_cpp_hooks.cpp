#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>

#include "runtime/autograd/cpp_autograd_hook.h"
#include "runtime/bindings/bindings.h"
#include "runtime/cpp_hooks/cpp_hook.h"
#include "runtime/cpp_hooks/cpp_hook_options.h"
#include "runtime/cpp_hooks/hook_libraries.h"
#include "runtime/hooks/hook_runner.h"
#include "runtime/hooks/named_errors.h"
#include "runtime/reducer/reducer_bucket.h"

namespace py = pybind11;
using torch::jit::PythonFutureWrapper;

namespace commhook {
namespace {

// "cpp('name', option=value)".
template <typename Spec>
std::string printed(const Spec& spec, const std::vector<OptionValue>& values) {
  const auto options = describe(spec.options, values);
  return "cpp(" + py::repr(py::str(spec.name)).cast<std::string>() +
         (options.empty() ? "" : ", " + options) + ")";
}

template <typename Spec>
std::vector<OptionValue> values_for(const Spec& spec, const py::dict& options) {
  return option_values("cpp('" + spec.name + "')", spec.options, options);
}

// The C++ view of a Python bucket. A bucket of this library's reducer gathers its gradients on
// demand.
std::unique_ptr<GradBucket> bucket_of(const py::object& bucket, ProcessGroupPtr group) {
  const auto [index, count] = index_and_count(bucket);
  const py::object source = bucket.attr("_source")();
  if (!source.is_none()) {
    return std::make_unique<GradBucket>(index, count, source.cast<ReducerBucket&>(),
                                        std::move(group));
  }
  return std::make_unique<GradBucket>(
      index, count, bucket.attr("parameters")().cast<std::vector<at::Tensor>>(),
      bucket.attr("buffer")().cast<at::Tensor>(), std::move(group),
      bucket.attr("sparse_grad_indices")().cast<std::optional<at::Tensor>>());
}

// Returns a Future of the checked result, and the number of bytes sent.
std::pair<std::shared_ptr<PythonFutureWrapper>, std::optional<int64_t>> start(
    const CppHook& hook, const py::object& python_bucket, ProcessGroupPtr group) {
  const auto bucket = bucket_of(python_bucket, std::move(group));
  py::gil_scoped_release no_gil;
  const auto run = std::make_shared<CppRun>(hook.start(*bucket));
  // then() passes an error on unchanged.
  auto checked = run->future->then(
      [run](c10::ivalue::Future&) { return c10::IValue(run->result()); }, c10::TensorType::get());
  return {std::make_shared<PythonFutureWrapper>(std::move(checked)), run->bytes_sent};
}

// A copy or a pickle is constructed anew, with its own memory.
template <typename Hook>
py::tuple reduced(const Hook& hook) {
  return py::make_tuple(
      py::type::of<Hook>(),
      py::make_tuple(hook.spec().name, named_values(hook.spec().options, hook.values())));
}

}  // namespace

void bind_cpp_hooks(py::module_& m) {
  m.def("open_hook_library", &open_hook_library, py::arg("path"),
        py::call_guard<py::gil_scoped_release>());
  m.def("take_hook_library", &take_hook_library, py::arg("path"),
        py::call_guard<py::gil_scoped_release>());
  py::class_<CppHook, std::shared_ptr<CppHook>>(m, "CppHook")
      .def(py::init([](const py::str& name, const py::dict& options) {
             const auto& spec = find_comm_hook(checked_name(name));
             auto values = values_for(spec, options);
             auto hook_name = printed(spec, values);
             return std::make_shared<CppHook>(spec, std::move(values), std::move(hook_name));
           }),
           py::arg("name"), py::arg("options"))
      .def_property_readonly("name", &CppHook::name)
      .def("__reduce__", &reduced<CppHook>)
      .def("start", &start, py::arg("bucket"), py::arg("group"))
      .def(
          "result_dtype",
          [](const CppHook& hook, const py::object& bucket, ProcessGroupPtr group) {
            const auto own = bucket_of(bucket, std::move(group));
            py::gil_scoped_release no_gil;
            return hook.result_dtype(*own);
          },
          py::arg("bucket"), py::arg("group"));
  py::class_<CppAutogradHook, std::shared_ptr<CppAutogradHook>>(m, "CppAutogradHook")
      .def(py::init([](const py::str& name, const py::dict& options) {
             const auto& spec = find_autograd_hook(checked_name(name));
             auto values = values_for(spec, options);
             auto hook_name = printed(spec, values);
             return std::make_shared<CppAutogradHook>(spec, std::move(values),
                                                      std::move(hook_name));
           }),
           py::arg("name"), py::arg("options"))
      .def_property_readonly("name", &CppAutogradHook::name)
      .def("__reduce__", &reduced<CppAutogradHook>)
      .def_property_readonly("kind",
                             [](const CppAutogradHook& hook) { return name_of(hook.kind()); });
}

}  // namespace commhook
