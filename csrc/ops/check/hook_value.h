// Compares a hook's result with the value that it replaces.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "ops/type_names.h"

namespace commhook {

// For example "torch.float32, torch.strided, cpu".
inline std::string kind_of(const at::Tensor& tensor) {
  return dtype_name(tensor.scalar_type()) + ", " + layout_name(tensor.layout()) + ", " +
         tensor.device().str();
}

// Compares dtype, layout, device and exact size. where() returns the beginning of the message, such
// as "hook 'f'".
template <typename Where>
void check_hook_value(const at::Tensor& was, const at::Tensor& now, const Where& where) {
  TORCH_CHECK(was.scalar_type() == now.scalar_type() && was.layout() == now.layout() &&
                  was.device() == now.device(),
              where(), " has changed the type of value (was ", kind_of(was), ", got ", kind_of(now),
              ")");
  TORCH_CHECK(was.sym_sizes() == now.sym_sizes(), where(), " has changed the size of value (was ",
              was.sym_sizes(), ", got ", now.sym_sizes(), ")");
}

}  // namespace commhook
