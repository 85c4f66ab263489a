// What a hook's result must have in common with the value that it takes the place of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cctype>
#include <string>

#include "ops/dtype_name.h"

namespace commhook {

// "torch.sparse_csr" for kSparseCsr.
inline std::string layout_name(at::Layout layout) {
  std::string name;
  for (const char letter : c10::str(layout)) {
    if (std::isupper(static_cast<unsigned char>(letter)) != 0 && !name.empty()) {
      name += '_';
    }
    name += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return "torch." + (name == "sparse" ? "sparse_coo" : name);
}

// "torch.float32, torch.strided, cpu".
inline std::string type_name(const at::Tensor& tensor) {
  return dtype_name(tensor.scalar_type()) + ", " + layout_name(tensor.layout()) + ", " +
         tensor.device().str();
}

// Dtype, layout, device and exact size. where() gives the beginning of the message: "hook 'f'".
template <typename Where>
void check_hook_value(const at::Tensor& was, const at::Tensor& now, const Where& where) {
  TORCH_CHECK(was.scalar_type() == now.scalar_type() && was.layout() == now.layout() &&
                  was.device() == now.device(),
              where(), " has changed the type of value (was ", type_name(was), ", got ",
              type_name(now), ")");
  TORCH_CHECK(was.sym_sizes() == now.sym_sizes(), where(), " has changed the size of value (was ",
              was.sym_sizes(), ", got ", now.sym_sizes(), ")");
}

}  // namespace commhook
