#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/autograd/autograd_hook_run.h"
#include "runtime/autograd/cpp_autograd_hook.h"
#include "runtime/autograd/engine_hooks.h"
#include "runtime/autograd/operator_hook.h"
#include "runtime/bindings/bindings.h"
#include "runtime/reducer/parameter_hooks.h"

namespace py = pybind11;

namespace commhook {
namespace {

Registered register_autograd_hook(const py::object& on, const std::string& kind_name,
                                  const py::object& hook) {
  const auto kind = hook_kind(kind_name);
  if (kind == HookKind::kTensor) {
    return register_tensor_hook(on, hook);
  }
  if (kind == HookKind::kPostAccumulate) {
    return register_post_accumulate_hook(on, hook);
  }
  return register_node_hook(on, kind, hook);
}

std::vector<std::optional<at::Tensor>> call_autograd_hooks(
    const std::vector<std::shared_ptr<AutogradHook>>& hooks, const std::string& kind,
    const std::vector<std::optional<at::Tensor>>& values,
    const std::vector<std::optional<at::Tensor>>& others) {
  const auto undefined_for_none = [](const std::vector<std::optional<at::Tensor>>& given) {
    variable_list list;
    for (const auto& value : given) {
      list.push_back(value.value_or(at::Tensor()));
    }
    return list;
  };
  const auto kind_of_hooks = hook_kind(kind);
  auto results = undefined_for_none(values);
  if (!hooks.empty()) {
    const auto list = std::make_shared<const std::vector<std::shared_ptr<const AutogradHook>>>(
        hooks.begin(), hooks.end());
    results =
        run_autograd_hooks(list, kind_of_hooks, std::move(results), undefined_for_none(others));
  }
  std::vector<std::optional<at::Tensor>> given_back;
  for (auto& result : results) {
    given_back.push_back(result.defined() ? std::optional(std::move(result)) : std::nullopt);
  }
  return given_back;
}

// Lets the garbage collector see the objects that a hook holds. An object in a cycle is freed
// together with the hook's node or tensor.
int visit_hook(PyObject* self, visitproc visit, void* arg) {
#if PY_VERSION_HEX >= 0x03090000
  Py_VISIT(Py_TYPE(self));
#endif
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  if (instance->get_value_and_holder().holder_constructed()) {
    const auto& hook = py::cast<const AutogradHook&>(py::handle(self));
    Py_VISIT(hook.callable().get().ptr());
    Py_VISIT(hook.traced().get().ptr());
  }
  return 0;
}

py::custom_type_setup seen_by_collector() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    heap_type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    heap_type->ht_type.tp_traverse = visit_hook;
  });
}

}  // namespace

void bind_autograd_hooks(py::module_& m) {
  py::class_<AutogradHook, std::shared_ptr<AutogradHook>>(m, "AutogradHook", seen_by_collector())
      .def(py::init([](py::object callable, const std::optional<std::string>& op_name,
                       const std::string& op_overload, const std::shared_ptr<CppAutogradHook>& cpp,
                       py::object traced, const std::string& kind) {
             NativeHook native;
             if (op_name) {
               native = operator_hook(*op_name, op_overload, hook_kind(kind));
             } else if (cpp) {
               TORCH_CHECK_TYPE(cpp->kind() == hook_kind(kind), "hook '", cpp->name(),
                                "' is one for kind '", name_of(cpp->kind()), "', got kind '", kind,
                                "'");
               native = cpp->native();
             }
             return std::make_shared<AutogradHook>(std::move(callable), std::move(native),
                                                   std::move(traced));
           }),
           py::arg("callable"), py::arg("op_name"), py::arg("op_overload"), py::arg("cpp"),
           py::arg("traced"), py::arg("kind"));
  py::class_<Registered>(m, "Registered")
      .def_readonly("id", &Registered::id)
      .def("remove",
           [](const Registered& registered) {
             if (const auto list = registered.list.lock()) {
               list->remove(registered.id);
             }
           })
      .def("is_registered", [](const Registered& registered) {
        const auto list = registered.list.lock();
        return list && list->contains(registered.id);
      });
  m.def("register_autograd_hook", &register_autograd_hook, py::arg("on"), py::arg("kind"),
        py::arg("hook"));
  m.def("call_autograd_hooks", &call_autograd_hooks, py::arg("hooks"), py::arg("kind"),
        py::arg("values"), py::arg("others"));
}

}  // namespace commhook
