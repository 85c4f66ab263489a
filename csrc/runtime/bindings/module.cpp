// The Python module torch_commhook._C.
#include <torch/csrc/utils/pybind.h>

#include "commhook/huge_pages.h"
#include "runtime/autograd/capture_notice.h"
#include "runtime/bindings/bindings.h"
#include "runtime/hooks/future_cast.h"
#include "runtime/hooks/grad_bucket.h"
#include "runtime/hooks/hook_result.h"
#include "runtime/hooks/hook_runner.h"
#include "runtime/python/hook_names.h"
#include "runtime/python/main_thread.h"
#include "runtime/python/waiting.h"
#include "runtime/reducer/ddp_hook.h"

namespace py = pybind11;

namespace {

at::Tensor parse_hook_result(const py::object& value, const py::object& bucket) {
  const auto [index, count] = commhook::index_and_count(bucket);
  const commhook::ResultSpec spec(commhook::bucket_name(index, count),
                                  bucket.attr("buffer")().cast<at::Tensor>());
  return commhook::check_result(commhook::tensor_in(value, spec.where), spec);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import(
      "torch._C._distributed_c10d");  // defines the types GradBucket, Reducer and Future
  commhook::remember_main_thread();
  m.def("built_for_torch", [] { return COMMHOOK_TORCH_VERSION; });
  m.def("hook_name", &commhook::hook_name, py::arg("hook"));
  m.def("type_name", &commhook::type_name, py::arg("value"));
  m.def("check_hook", &commhook::check_hook, py::arg("hook"));
  m.def("run_hook", &commhook::run_hook, py::arg("hook"), py::arg("state"), py::arg("bucket"));
  m.def("run_average", &commhook::run_average, py::arg("hook"), py::arg("bucket"));
  m.def("as_future", &commhook::as_future, py::arg("returned"), py::arg("where"));
  m.def(
      "has_devices",
      [](const std::shared_ptr<torch::jit::PythonFutureWrapper>& future) {
        return !future->fut->devices().empty();
      },
      py::arg("future"));
  m.def("parse_hook_result", &parse_hook_result, py::arg("value"), py::arg("bucket"));
  m.def("make_grad_bucket", &commhook::make_grad_bucket, py::arg("index"), py::arg("bucket_count"),
        py::arg("buffer"), py::arg("parameters"), py::arg("sparse_grad_indices"));
  m.def("bucket_count", &commhook::bucket_count, py::arg("bucket"));
  m.def(
      "sparse_grad_indices", [](c10d::GradBucket& bucket) { return bucket.getSparseGradIndices(); },
      py::arg("bucket"));
  m.def("register_ddp_hook", &commhook::register_ddp_hook, py::arg("reducer"), py::arg("road"),
        py::arg("as_views"), py::arg("timeout_seconds"), py::arg("drain_seconds"));
  m.def("locally_used", &commhook::locally_used, py::arg("reducer"));
  m.def("first_backward_is_open", &commhook::first_backward_is_open, py::arg("reducer"));
  m.def("prefer_huge_pages", &commhook::preferHugePages, py::arg("tensor"),
        py::call_guard<py::gil_scoped_release>());
  m.def("cast_into", &commhook::cast_into, py::arg("returned"), py::arg("destination"),
        py::arg("dtype"), py::arg("where"));
  commhook::bind_autograd_hooks(m);
  commhook::bind_bucket(m);
  commhook::bind_collectives(m);
  commhook::bind_cpp_hooks(m);
  commhook::bind_membership(m);
  commhook::bind_process_group(m);
  commhook::bind_profiling(m);
  commhook::bind_reducer(m);
  commhook::bind_wire(m);
  m.def("call_before_capture", &commhook::call_before_capture, py::arg("parameters"),
        py::arg("callback"));
  m.def(
      "wait_for",
      [](const std::shared_ptr<torch::jit::PythonFutureWrapper>& future, double seconds) {
        return commhook::wait_for(*future->fut, seconds);
      },
      py::arg("future"), py::arg("seconds"));
  m.def(
      "wait_for_result",
      [](const std::shared_ptr<torch::jit::PythonFutureWrapper>& future, const std::string& where,
         double seconds) { commhook::wait_for_result(*future->fut, where, seconds); },
      py::arg("future"), py::arg("where"), py::arg("seconds"));
}
