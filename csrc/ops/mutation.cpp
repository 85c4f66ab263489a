#include "ops/mutation.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <string>

#include "ops/autograd_checks.h"

namespace commhook {
namespace {

// visit(name, index, tensor, is_written) for each tensor among the arguments.
template <typename Visit>
void for_each_tensor(const c10::FunctionSchema& schema, const torch::jit::Stack& stack,
                     const Visit& visit) {
  const auto& arguments = schema.arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* const alias = arguments[i].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    const auto& name = arguments[i].name();
    if (values[i].isTensor()) {
      visit(name.c_str(), -1, values[i].toTensor(), is_written);
    } else if (values[i].isTensorList()) {
      int64_t index = 0;
      for (const auto& tensor : values[i].toTensorVector()) {
        visit(name.c_str(), index++, tensor, is_written);
      }
    }
  }
}

std::string short_name(const c10::FunctionSchema& schema) {
  const auto& name = schema.name();
  return name.substr(name.rfind(':') + 1);
}

}  // namespace

void refuse_recorded(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                     torch::jit::Stack* stack) {
  const auto name = short_name(op.schema());
  for_each_tensor(op.schema(), *stack,
                  [&](const char* argument, int64_t index, const at::Tensor& tensor, bool) {
                    check_not_recorded(name.c_str(), argument, index, tensor,
                                       "call it under torch.no_grad()");
                    if (tensor.defined()) {
                      check_no_forward_gradient(name.c_str(), argument, index, tensor);
                    }
                  });
  const at::AutoDispatchBelowAutograd guard;
  op.callBoxed(stack);
}

void move_versions(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                   torch::jit::Stack* stack) {
  const auto name = short_name(op.schema());
  std::vector<at::Tensor> written;
  for_each_tensor(op.schema(), *stack,
                  [&](const char* argument, int64_t index, const at::Tensor& tensor, bool writes) {
                    if (writes && tensor.defined()) {
                      check_has_version(name.c_str(), argument, index, tensor);
                      written.push_back(tensor);
                    }
                  });
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  for (const auto& tensor : written) {
    torch::autograd::increment_version(tensor);
  }
}

}  // namespace commhook
