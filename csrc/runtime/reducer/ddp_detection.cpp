#include "runtime/reducer/ddp_detection.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace commhook {

bool has_ddp_hook(const at::Tensor& parameter) {
  if (!parameter.is_leaf()) {
    return false;
  }
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) {
    return false;
  }
  const auto& hooks = accumulator->post_hooks();
  // In PyTorch, only DDP's reducer creates hooks of this class.
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr;
  });
}

}  // namespace commhook
