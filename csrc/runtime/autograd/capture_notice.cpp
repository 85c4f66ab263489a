#include "runtime/autograd/capture_notice.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>

#include "runtime/python/py_ref.h"

namespace py = pybind11;

namespace commhook {
namespace {

struct Callback {
  std::optional<PyRef> function;
};

class CaptureNotice : public torch::autograd::FunctionPreHook {
 public:
  explicit CaptureNotice(std::shared_ptr<Callback> callback) : callback_(std::move(callback)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    return grads;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    py::gil_scoped_acquire gil;
    if (callback_->function) {
      const py::object function = callback_->function->get();
      if (function().cast<bool>()) {
        callback_->function.reset();
      }
    }
  }

 private:
  std::shared_ptr<Callback> callback_;
};

}  // namespace

void call_before_capture(const std::vector<at::Tensor>& parameters, py::object callback) {
  const auto shared = std::make_shared<Callback>();
  shared->function.emplace(std::move(callback));
  for (const auto& parameter : parameters) {
    torch::autograd::impl::grad_accumulator(parameter)->add_pre_hook(
        std::make_unique<CaptureNotice>(shared));
  }
}

}  // namespace commhook
