// Autograd kernels for the operators of codecs and of low_rank, which write to arguments and have
// no derivative.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace commhook {

// For the key Autograd: refuses tensors that are part of a graph that is being recorded.
void refuse_recorded(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack);
// For the key ADInplaceOrView: moves the versions of the tensors that the operator writes.
void move_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack);

// Calls m.impl(...) for both keys.
#define COMMHOOK_MUTATING_OPERATOR(library, name)                                          \
  TORCH_LIBRARY_IMPL(library, Autograd, m) {                                               \
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&commhook::refuse_recorded>()); \
  }                                                                                        \
  TORCH_LIBRARY_IMPL(library, ADInplaceOrView, m) {                                        \
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&commhook::move_versions>());   \
  }

}  // namespace commhook
