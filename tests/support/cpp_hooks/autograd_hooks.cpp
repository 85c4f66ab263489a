// Hooks of the autograd engine for tests.
#include <ATen/ATen.h>
#include <commhook/autograd_hook.h>

#include <stdexcept>

namespace {

using Tensors = std::vector<at::Tensor>;

commhook::TensorHook scale(double factor) {
  return [factor](const at::Tensor& grad) { return grad * factor; };
}
COMMHOOK_REGISTER_AUTOGRAD_HOOK(scale, "scale", commhook::Option<double>("factor"));

// The example of docs/cpp_hooks.md.
commhook::TensorHook clip(double limit) {
  return [limit](const at::Tensor& grad) { return grad.clamp(-limit, limit); };
}
COMMHOOK_REGISTER_AUTOGRAD_HOOK(clip, "clip", commhook::Option<double>("limit").above(0));

commhook::PreHook scale_all(double factor) {
  return [factor](const Tensors& grads) {
    Tensors scaled;
    for (const auto& grad : grads) {
      scaled.push_back(grad.defined() ? grad * factor : grad);
    }
    return scaled;
  };
}
COMMHOOK_REGISTER_AUTOGRAD_HOOK(scale_all, "scale_all", commhook::Option<double>("factor", 2.0));

commhook::PostHook add_outputs() {
  return [](const Tensors& grad_inputs, const Tensors& grad_outputs) {
    Tensors sums = grad_inputs;
    sums[0] = sums[0] + grad_outputs[0];
    return sums;
  };
}
COMMHOOK_REGISTER_AUTOGRAD_HOOK(add_outputs, "add_outputs");

commhook::PostAccumulateHook halve() {
  return [](const at::Tensor& parameter) { parameter.mutable_grad().mul_(0.5); };
}
COMMHOOK_REGISTER_AUTOGRAD_HOOK(halve, "halve");

commhook::TensorHook unchanged() {
  return [](const at::Tensor&) { return at::Tensor(); };
}
COMMHOOK_REGISTER_AUTOGRAD_HOOK(unchanged, "unchanged");

commhook::TensorHook wrong(const std::string& how) {
  TORCH_CHECK_VALUE(how != "make", "made wrong");
  return [how](const at::Tensor& grad) -> at::Tensor {
    if (how == "throws an int") {
      throw 42;
    }
    if (how == "raises") {
      throw std::runtime_error("out of order");
    }
    TORCH_CHECK_INDEX(how != "index", "no such place");
    return how == "dtype" ? grad.to(at::kHalf) : grad.unsqueeze(0);
  };
}
COMMHOOK_REGISTER_AUTOGRAD_HOOK(wrong, "wrong", commhook::Option<std::string>("how"));

commhook::PreHook one_less() {
  return [](const Tensors&) { return Tensors(); };
}
COMMHOOK_REGISTER_AUTOGRAD_HOOK(one_less, "one_less");

commhook::TensorHook nothing() { return {}; }
COMMHOOK_REGISTER_AUTOGRAD_HOOK(nothing, "nothing");

}  // namespace
