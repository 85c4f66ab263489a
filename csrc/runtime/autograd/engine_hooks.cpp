#include "runtime/autograd/engine_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "runtime/autograd/autograd_hook_run.h"
#include "runtime/autograd/collectable_hooks.h"
#include "runtime/python/hook_names.h"

namespace py = pybind11;
using torch::autograd::PyFunctionPostHook;
using torch::autograd::PyFunctionPreHook;
using torch::autograd::PyFunctionTensorPreHook;
using torch::dynamo::autograd::CompiledNodeArgs;

namespace commhook {
namespace {

class TensorHooks : public CollectableHooks<PyFunctionTensorPreHook> {
 public:
  using CollectableHooks::CollectableHooks;
  size_t output() const { return value_idx; }

  variable_list operator()(const variable_list& grads) override {
    const auto hooks = this->hooks();
    if (!hooks) {
      return grads;
    }
    const auto output = value_idx;  // a copy, since a hook may delete this object
    variable_list results = grads;
    results[output] = run_autograd_hooks(hooks, HookKind::kTensor, grads.at(output));
    return results;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    py::gil_scoped_acquire gil;
    each_traced(hooks(), [&](c10::SafePyObject hook) {
      args.add_tensor_pre_hook(std::move(hook), static_cast<int>(value_idx));
    });
  }
};

class PreHooks : public CollectableHooks<PyFunctionPreHook> {
 public:
  using CollectableHooks::CollectableHooks;

  variable_list operator()(const variable_list& grads) override {
    const auto hooks = this->hooks();
    return hooks ? run_autograd_hooks(hooks, HookKind::kPre, grads, {}) : grads;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    py::gil_scoped_acquire gil;
    each_traced(hooks(), [&](c10::SafePyObject hook) { args.add_pre_hook(std::move(hook)); });
  }
};

class PostHooks : public CollectableHooks<PyFunctionPostHook> {
 public:
  using CollectableHooks::CollectableHooks;

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    const auto hooks = this->hooks();
    return hooks ? run_autograd_hooks(hooks, HookKind::kPost, outputs, inputs) : outputs;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    py::gil_scoped_acquire gil;
    each_traced(hooks(), [&](c10::SafePyObject hook) { args.add_post_hook(std::move(hook)); });
  }
};

// Adds a hook to this library's list among `hooks`, if one fits; otherwise to a new list, which
// add(made) stores there.
template <typename Ours, typename Hooks, typename Fits, typename Add>
Registered add_to_list(const Hooks& hooks, const py::object& hook, const Fits& fits,
                       const Add& add) {
  std::shared_ptr<HookList> list;
  for (const auto& held : hooks) {
    const auto* ours = dynamic_cast<const Ours*>(held.get());
    if (ours != nullptr && fits(*ours)) {
      list = ours->list();
    }
  }
  if (!list) {
    const HookDict made;
    list = made.list;
    add(made);
  }
  return {list, list->add(hook)};
}

using NodePtr = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;

// Before torch 2.13, a Python function holds its node weakly.
[[maybe_unused]] NodePtr locked(const NodePtr& node) { return node; }
template <typename Weak>
NodePtr locked(const Weak& node) {
  return node.lock();
}

NodePtr node_of(const py::object& node) {
  if (torch::autograd::THPCppFunction_Check(node.ptr())) {
    return reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata;
  }
  if (THPFunction_Check(node.ptr())) {
    return locked(reinterpret_cast<THPFunction*>(node.ptr())->cdata);
  }
  return {};
}

}  // namespace

Registered register_tensor_hook(const py::object& tensor, const py::object& hook) {
  const auto variable = tensor.cast<at::Tensor>();
  TORCH_CHECK(variable.requires_grad(),
              "register_hook: tensor must require grad, got one that does not");
  const auto& node = variable.grad_fn();
  auto& of_tensor = torch::autograd::impl::hooks(variable);
  if (node) {
    const size_t output = variable.output_nr();
    const auto fits = [&](const TensorHooks& ours) { return ours.output() == output; };
    return add_to_list<TensorHooks>(
        node->tensor_pre_hooks(), hook, fits, [&](const HookDict& made) {
          node->tensor_pre_hooks().push_back(std::make_unique<TensorHooks>(made, output));
          of_tensor.push_back(std::make_unique<TensorHooks>(made, 0));  // in case it becomes a leaf
        });
  }
  if (tensor.attr("_backward_hooks").is_none()) {
    // PyTorch's first registration drops all other hooks of a leaf. This one keeps them.
    auto held = std::move(of_tensor);
    tensor.attr("_backward_hooks") = py::module_::import("collections").attr("OrderedDict")();
    std::move(held.begin(), held.end(), std::back_inserter(of_tensor));
  }
  const auto any = [](const auto&) { return true; };
  return add_to_list<TensorHooks>(of_tensor, hook, any, [&](const HookDict& made) {
    of_tensor.push_back(std::make_unique<TensorHooks>(made, 0));
  });
}

Registered register_node_hook(const py::object& node, HookKind kind, const py::object& hook) {
  const auto found = node_of(node);
  TORCH_CHECK_TYPE(found, "node must be a torch.autograd.graph.Node, got ", type_name(node));
  const auto any = [](const auto&) { return true; };
  if (kind == HookKind::kPre) {
    return add_to_list<PreHooks>(found->pre_hooks(), hook, any, [&](const HookDict& made) {
      found->add_pre_hook(std::make_unique<PreHooks>(made));
    });
  }
  return add_to_list<PostHooks>(found->post_hooks(), hook, any, [&](const HookDict& made) {
    found->add_post_hook(std::make_unique<PostHooks>(made));
  });
}

}  // namespace commhook
