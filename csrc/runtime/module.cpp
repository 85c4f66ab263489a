// The Python module torch_commhook._C.
#include <torch/csrc/utils/pybind.h>

#include "runtime/arrivals.h"
#include "runtime/autograd_hook_run.h"
#include "runtime/backends.h"
#include "runtime/capture_notice.h"
#include "runtime/ddp_detection.h"
#include "runtime/ddp_hook.h"
#include "runtime/engine_hooks.h"
#include "runtime/future_cast.h"
#include "runtime/grad_bucket.h"
#include "runtime/hook_names.h"
#include "runtime/hook_result.h"
#include "runtime/hook_runner.h"
#include "runtime/huge_pages.h"
#include "runtime/parameter_hooks.h"
#include "runtime/waiting.h"

namespace py = pybind11;

namespace {

at::Tensor parse_hook_result(const py::object& value, const py::object& bucket) {
  const auto [index, count] = commhook::index_and_count(bucket);
  const commhook::ResultSpec spec(commhook::bucket_name(index, count),
                                  bucket.attr("buffer")().cast<at::Tensor>());
  return commhook::check_result(commhook::tensor_in(value, spec.where), spec);
}

commhook::Registered register_autograd_hook(const py::object& on, const std::string& kind_name,
                                            std::shared_ptr<commhook::AutogradHook> hook) {
  const auto kind = commhook::hook_kind(kind_name);
  if (kind == commhook::HookKind::kTensor) {
    return commhook::register_tensor_hook(on, std::move(hook));
  }
  if (kind == commhook::HookKind::kPostAccumulate) {
    return commhook::register_post_accumulate_hook(on, std::move(hook));
  }
  return commhook::register_node_hook(on, kind, std::move(hook));
}

std::vector<std::optional<at::Tensor>> call_autograd_hooks(
    const std::vector<std::shared_ptr<commhook::AutogradHook>>& hooks, const std::string& kind,
    const std::vector<std::optional<at::Tensor>>& values,
    const std::vector<std::optional<at::Tensor>>& others) {
  const auto undefined_for_none = [](const std::vector<std::optional<at::Tensor>>& given) {
    commhook::variable_list list;
    for (const auto& value : given) {
      list.push_back(value.value_or(at::Tensor()));
    }
    return list;
  };
  const auto hook_kind = commhook::hook_kind(kind);
  auto results = undefined_for_none(values);
  if (!hooks.empty()) {
    const auto list =
        std::make_shared<const std::vector<std::shared_ptr<const commhook::AutogradHook>>>(
            hooks.begin(), hooks.end());
    results = commhook::run_autograd_hooks(list, hook_kind, std::move(results),
                                           undefined_for_none(others));
  }
  std::vector<std::optional<at::Tensor>> given_back;
  for (auto& result : results) {
    given_back.push_back(result.defined() ? std::optional(std::move(result)) : std::nullopt);
  }
  return given_back;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import(
      "torch._C._distributed_c10d");  // GradBucket, Reducer and Future are its types
  m.def("built_for_torch", [] { return COMMHOOK_TORCH_VERSION; });
  m.def("hook_name", &commhook::hook_name, py::arg("hook"));
  m.def("type_name", &commhook::type_name, py::arg("value"));
  m.def("check_hook", &commhook::check_hook, py::arg("hook"));
  m.def("run_hook", &commhook::run_hook, py::arg("hook"), py::arg("state"), py::arg("bucket"));
  m.def("run_average", &commhook::run_average, py::arg("hook"), py::arg("bucket"));
  m.def("as_future", &commhook::as_future, py::arg("returned"), py::arg("where"));
  m.def("parse_hook_result", &parse_hook_result, py::arg("value"), py::arg("bucket"));
  m.def("make_grad_bucket", &commhook::make_grad_bucket, py::arg("index"), py::arg("bucket_count"),
        py::arg("buffer"), py::arg("offsets"), py::arg("lengths"), py::arg("parameters"),
        py::arg("sparse_grad_indices"));
  m.def("bucket_count", &commhook::bucket_count, py::arg("bucket"));
  m.def(
      "sparse_grad_indices", [](c10d::GradBucket& bucket) { return bucket.getSparseGradIndices(); },
      py::arg("bucket"));
  m.def("register_ddp_hook", &commhook::register_ddp_hook, py::arg("reducer"), py::arg("runner"),
        py::arg("choose_delivery"), py::arg("end_step"), py::arg("timeout_seconds"),
        py::arg("drain_seconds"));
  m.def("prefer_huge_pages", &commhook::prefer_huge_pages, py::arg("tensor"),
        py::call_guard<py::gil_scoped_release>());
  m.def("cast_into", &commhook::cast_into, py::arg("returned"), py::arg("destination"),
        py::arg("dtype"), py::arg("where"));
  py::class_<commhook::Arrivals, std::shared_ptr<commhook::Arrivals>>(m, "Arrivals")
      .def(py::init<py::object, int64_t>(), py::arg("listener"), py::arg("parameter_count"))
      .def("assign", &commhook::Arrivals::assign, py::arg("bucket_of"))
      .def("count_in_this_backward", &commhook::Arrivals::count_in_this_backward,
           py::arg("tell_full"))
      .def("reset", &commhook::Arrivals::reset)
      .def("close", &commhook::Arrivals::close)
      .def("missing", &commhook::Arrivals::missing)
      .def("take_order", &commhook::Arrivals::take_order)
      .def("stop_noting_order", &commhook::Arrivals::stop_noting_order);
  m.def("count_arrivals", &commhook::count_arrivals, py::arg("parameter"), py::arg("own_key"),
        py::arg("arrivals").none(false), py::arg("number"));
  m.def("has_ddp_hook", &commhook::has_ddp_hook, py::arg("parameter"));
  m.def("stop_counting", &commhook::stop_counting, py::arg("parameter"));
  py::class_<commhook::AutogradHook, std::shared_ptr<commhook::AutogradHook>>(m, "AutogradHook")
      .def(py::init([](py::object callable, const std::optional<std::string>& op_name,
                       const std::string& op_overload, py::object traced, const std::string& kind) {
             return std::make_shared<commhook::AutogradHook>(std::move(callable), op_name,
                                                             op_overload, std::move(traced),
                                                             commhook::hook_kind(kind));
           }),
           py::arg("callable"), py::arg("op_name"), py::arg("op_overload"), py::arg("traced"),
           py::arg("kind"));
  py::class_<commhook::Registered>(m, "Registered")
      .def_readonly("id", &commhook::Registered::id)
      .def("remove",
           [](const commhook::Registered& registered) {
             if (const auto list = registered.list.lock()) {
               list->remove(registered.id);
             }
           })
      .def("is_registered", [](const commhook::Registered& registered) {
        const auto list = registered.list.lock();
        return list && list->contains(registered.id);
      });
  m.def("register_autograd_hook", &register_autograd_hook, py::arg("on"), py::arg("kind"),
        py::arg("hook"));
  m.def("call_autograd_hooks", &call_autograd_hooks, py::arg("hooks"), py::arg("kind"),
        py::arg("values"), py::arg("others"));
  m.def("call_before_capture", &commhook::call_before_capture, py::arg("parameters"),
        py::arg("callback"));
  m.def("drop_backends", &commhook::drop_backends, py::arg("group"),
        py::call_guard<py::gil_scoped_release>());
  m.def(
      "wait_for",
      [](const std::shared_ptr<torch::jit::PythonFutureWrapper>& future, double seconds) {
        return commhook::wait_for(*future->fut, seconds);
      },
      py::arg("future"), py::arg("seconds"));
}
