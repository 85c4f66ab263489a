#include "runtime/autograd/operator_hook.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace commhook {
namespace {

c10::IValue argument(const c10::Argument& formal, const variable_list& values) {
  if (formal.type()->isSubtypeOf(*c10::TensorType::get())) {
    return values[0];
  }
  if (formal.type()->isSubtypeOf(*c10::ListType::ofTensors())) {
    return c10::List<at::Tensor>(at::ArrayRef<at::Tensor>(values));
  }
  c10::List<std::optional<at::Tensor>> list;
  list.reserve(values.size());
  for (const auto& value : values) {
    list.push_back(value.defined() ? std::optional(value) : std::nullopt);
  }
  return list;
}

// Checks that an operator's schema fits the kind of hook.
void check_schema(const c10::FunctionSchema& schema, HookKind kind) {
  const auto& formals = schema.arguments();
  const bool several = kind == HookKind::kPre || kind == HookKind::kPost;
  const size_t needed = kind == HookKind::kPost ? 2 : 1;
  const auto of_tensors = [](const c10::TypePtr& type) {
    return type->isSubtypeOf(*c10::ListType::ofTensors()) ||
           type->isSubtypeOf(*c10::ListType::ofOptionalTensors());
  };
  bool fits = formals.size() >= needed;
  for (size_t i = 0; fits && i < formals.size(); ++i) {
    const auto& type = formals[i].type();
    fits = i >= needed ? formals[i].default_value().has_value()
           : several   ? of_tensors(type)
                       : type->isSubtypeOf(*c10::TensorType::get());
  }
  const auto& returns = schema.returns();
  if (kind == HookKind::kPostAccumulate) {
    fits = fits && returns.empty();
  } else if (!returns.empty()) {
    fits = fits && returns.size() == 1 &&
           (several ? of_tensors(returns[0].type())
                    : returns[0].type()->isSubtypeOf(*c10::TensorType::get()));
  }
  const char* contract = kind == HookKind::kTensor           ? "(Tensor) -> Tensor or ()"
                         : kind == HookKind::kPostAccumulate ? "(Tensor) -> ()"
                         : kind == HookKind::kPre ? "(Tensor[]) -> Tensor[] or ()"
                                                  : "(Tensor[], Tensor[]) -> Tensor[] or ()";
  TORCH_CHECK_TYPE(fits, "an operator as this kind of hook must take and return ", contract,
                   ", got ", schema);
}

}  // namespace

NativeHook operator_hook(const std::string& name, const std::string& overload, HookKind kind) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  TORCH_CHECK_TYPE(found, "a hook must be one operator, got ", name, overload.empty() ? "" : ".",
                   overload, ", which the dispatcher does not know");
  const auto op = *found;
  check_schema(op.schema(), kind);
  return [op, kind](const variable_list& values, const variable_list& others) {
    const auto& schema = op.schema();
    torch::jit::Stack stack;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& formal = schema.arguments()[i];
      if (i == 0 || (i == 1 && kind == HookKind::kPost)) {
        stack.push_back(argument(formal, i == 0 ? values : others));
      } else {
        stack.push_back(*formal.default_value());
      }
    }
    op.callBoxed(stack);
    if (schema.returns().empty()) {
      return values;
    }
    if (stack.back().isTensor()) {
      return variable_list{stack.back().toTensor()};
    }
    variable_list results;
    for (const auto& value : stack.back().toListRef()) {
      results.push_back(value.isNone() ? at::Tensor() : value.toTensor());
    }
    return results;
  };
}

}  // namespace commhook
