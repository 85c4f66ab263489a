#include "runtime/reducer/parameter_hooks.h"

#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <mutex>
#include <utility>

#include "runtime/autograd/autograd_hook_run.h"

namespace py = pybind11;
using torch::autograd::PostAccumulateGradHook;
using torch::autograd::Variable;

namespace commhook {
namespace {

struct Counting {
  std::shared_ptr<Arrivals> arrivals;
  int64_t number;
  int64_t own_key;
};

class ParameterHooks : public PostAccumulateGradHook {
 public:
  ParameterHooks(std::unique_ptr<PostAccumulateGradHook> python, py::dict dict)
      : held_(std::make_shared<Held>(std::move(python), std::move(dict))),
        list_(std::make_shared<HookList>()) {}

  void operator()(const Variable& parameter) override {
    const auto counting = this->counting();
    if (counting) {  // even if the hooks before ours raise an error
      counting->arrivals->touch(counting->number);
    }
    const auto hooks = list_->snapshot();
    // One word, which is safe to read without the GIL.
    const bool pytorchs = PyDict_GET_SIZE(held_->dict.get().ptr()) > (counting ? 1 : 0);
    // A copy, since a hook may delete this object.
    const auto held = hooks || pytorchs ? held_ : nullptr;
    if (hooks) {
      run_autograd_hooks(hooks, HookKind::kPostAccumulate, parameter);
    }
    if (pytorchs) {
      (*held->hooks)(parameter);
    }
    if (counting) {
      counting->arrivals->arrive(counting->number);
    }
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    py::gil_scoped_acquire gil;
    each_traced(list_->snapshot(),
                [&](c10::SafePyObject hook) { args.add_post_acc_grad_hook(std::move(hook)); });
    if (const auto counting = this->counting()) {
      counting->arrivals->capture(counting->number);
      const auto dict = py::reinterpret_borrow<py::dict>(held_->dict.get());
      const py::int_ key(counting->own_key);
      if (dict.size() > 1 && dict.contains(key)) {  // runs last here too
        const py::object own = dict[key];
        dict.attr("pop")(key);
        dict[key] = own;
      }
    }
    held_->hooks->compiled_args(args);
  }

  void apply_with_saved(Variable& parameter,
                        torch::dynamo::autograd::SwapSavedVariables& saved) override {
    held_->hooks->apply_with_saved(parameter, saved);
  }

  const std::shared_ptr<HookList>& list() const { return list_; }

  void count(std::shared_ptr<const Counting> counting) {
    const std::lock_guard lock(mutex_);
    counting_.swap(counting);
  }

 private:
  std::shared_ptr<const Counting> counting() const {
    const std::lock_guard lock(mutex_);
    return counting_;
  }

  // PyTorch's hook, and its dict.
  struct Held {
    Held(std::unique_ptr<PostAccumulateGradHook> pytorchs, py::dict python_dict)
        : hooks(std::move(pytorchs)), dict(std::move(python_dict)) {}
    const std::unique_ptr<PostAccumulateGradHook> hooks;
    const PyRef dict;
  };

  const std::shared_ptr<Held> held_;
  const std::shared_ptr<HookList> list_;
  mutable std::mutex mutex_;
  std::shared_ptr<const Counting> counting_;
};

ParameterHooks& hooks_of(const py::object& tensor) {
  const auto variable = tensor.cast<at::Tensor>();
  const char* dict_name = "_post_accumulate_grad_hooks";
  if (tensor.attr(dict_name).is_none()) {
    tensor.attr(dict_name) = py::module_::import("collections").attr("OrderedDict")();
  }
  auto& held = torch::autograd::impl::post_acc_grad_hooks(variable);
  auto* ours = dynamic_cast<ParameterHooks*>(held.get());
  if (ours == nullptr) {
    const py::object dict = tensor.attr(dict_name);
    TORCH_CHECK_TYPE(held && py::isinstance<py::dict>(dict), dict_name, " must be a dict");
    auto made = std::make_unique<ParameterHooks>(std::move(held), py::dict(dict));
    ours = made.get();
    held = std::move(made);
  }
  return *ours;
}

}  // namespace

Registered register_post_accumulate_hook(const py::object& tensor, const py::object& hook) {
  const auto list = hooks_of(tensor).list();
  return {list, list->add(hook)};
}

void count_arrivals(const py::object& parameter, int64_t own_key,
                    std::shared_ptr<Arrivals> arrivals, int64_t number) {
  TORCH_CHECK_INDEX(number >= 0 && number < arrivals->parameter_count(),
                    "count_arrivals: there is no parameter ", number);
  hooks_of(parameter).count(
      std::make_shared<const Counting>(Counting{std::move(arrivals), number, own_key}));
}

void stop_counting(const at::Tensor& parameter) {
  auto& held = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (auto* ours = dynamic_cast<ParameterHooks*>(held.get())) {
    ours->count(nullptr);
  }
}

}  // namespace commhook
