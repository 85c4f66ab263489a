#include "runtime/engine_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <utility>

#include "runtime/autograd_hook_run.h"
#include "runtime/hook_names.h"

namespace py = pybind11;
using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::dynamo::autograd::CompiledNodeArgs;

namespace commhook {
namespace {

template <typename Base>
class Held : public Base {
 public:
  explicit Held(std::shared_ptr<HookList> list) : list_(std::move(list)) {}
  const std::shared_ptr<HookList>& list() const { return list_; }

 protected:
  std::shared_ptr<HookList> list_;
};

class TensorHooks : public Held<FunctionPreHook> {
 public:
  TensorHooks(std::shared_ptr<HookList> list, size_t output)
      : Held(std::move(list)), output_(output) {}
  size_t output() const { return output_; }

  variable_list operator()(const variable_list& grads) override {
    const auto hooks = list_->snapshot();
    if (!hooks || !grads.at(output_).defined()) {
      return grads;
    }
    const auto output = output_;  // a hook may drop what this belongs to
    variable_list results = grads;
    results[output] = run_autograd_hooks(hooks, HookKind::kTensor, grads[output]);
    return results;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    py::gil_scoped_acquire gil;
    each_traced(*list_, [&](c10::SafePyObject hook) {
      args.add_tensor_pre_hook(std::move(hook), static_cast<int>(output_));
    });
  }

 private:
  size_t output_;
};

class PreHooks : public Held<FunctionPreHook> {
 public:
  using Held::Held;

  variable_list operator()(const variable_list& grads) override {
    const auto hooks = list_->snapshot();
    return hooks ? run_autograd_hooks(hooks, HookKind::kPre, grads, {}) : grads;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    py::gil_scoped_acquire gil;
    each_traced(*list_, [&](c10::SafePyObject hook) { args.add_pre_hook(std::move(hook)); });
  }
};

class PostHooks : public Held<FunctionPostHook> {
 public:
  using Held::Held;

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    const auto hooks = list_->snapshot();
    return hooks ? run_autograd_hooks(hooks, HookKind::kPost, outputs, inputs) : outputs;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    py::gil_scoped_acquire gil;
    each_traced(*list_, [&](c10::SafePyObject hook) { args.add_post_hook(std::move(hook)); });
  }
};

// Adds a hook to the list of ours among `hooks`, if there is one that fits; else to a new list,
// which add(list) puts there.
template <typename Ours, typename Hooks, typename Fits, typename Add>
Registered add_to_list(const Hooks& hooks, std::shared_ptr<const AutogradHook> hook,
                       const Fits& fits, const Add& add) {
  std::shared_ptr<HookList> list;
  for (const auto& held : hooks) {
    const auto* ours = dynamic_cast<const Ours*>(held.get());
    if (ours != nullptr && fits(*ours)) {
      list = ours->list();
    }
  }
  if (!list) {
    list = std::make_shared<HookList>();
    add(list);
  }
  return {list, list->add(std::move(hook))};
}

using NodePtr = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;

// What a Python function holds of its node is weak before torch 2.13.
NodePtr locked(const NodePtr& node) { return node; }
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

Registered register_tensor_hook(const py::object& tensor,
                                std::shared_ptr<const AutogradHook> hook) {
  const auto variable = tensor.cast<at::Tensor>();
  TORCH_CHECK(variable.requires_grad(),
              "register_hook: tensor must require grad, got one that does not");
  const size_t output = variable.output_nr();
  const auto& node = variable.grad_fn();
  if (!node && tensor.attr("_backward_hooks").is_none()) {
    // PyTorch's first registration drops all other hooks of a leaf; this is one.
    tensor.attr("_backward_hooks") = py::module_::import("collections").attr("OrderedDict")();
  }
  auto& hooks = node ? node->tensor_pre_hooks() : torch::autograd::impl::hooks(variable);
  return add_to_list<TensorHooks>(
      hooks, std::move(hook), [&](const TensorHooks& ours) { return ours.output() == output; },
      [&](const auto& list) { hooks.push_back(std::make_unique<TensorHooks>(list, output)); });
}

Registered register_node_hook(const py::object& node, HookKind kind,
                              std::shared_ptr<const AutogradHook> hook) {
  const auto found = node_of(node);
  TORCH_CHECK_TYPE(found, "node must be a torch.autograd.graph.Node, got ", type_name(node));
  const auto any = [](const auto&) { return true; };
  if (kind == HookKind::kPre) {
    return add_to_list<PreHooks>(found->pre_hooks(), std::move(hook), any, [&](const auto& list) {
      found->add_pre_hook(std::make_unique<PreHooks>(list));
    });
  }
  return add_to_list<PostHooks>(found->post_hooks(), std::move(hook), any, [&](const auto& list) {
    found->add_post_hook(std::make_unique<PostHooks>(list));
  });
}

}  // namespace commhook
