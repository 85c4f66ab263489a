// What the kernels of check_finite share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <vector>

namespace commhook {

// Throws an error that names the operator, the argument, its contract and the value.
// tensors: dense or sparse, on the device of count; count: dense, of int64, one element.
C10_EXPORT void check_finite_arguments(at::TensorList tensors, const at::Tensor& count);

// The tensors, apart by how they are checked.
struct Checked {
  // Of the dtypes that have kernels. Each is one row where its elements lie together, in whatever
  // order: counting needs none.
  std::vector<at::Tensor> rows;
  std::vector<at::Tensor> others;
};
C10_EXPORT Checked split_by_dtype(at::TensorList tensors);

namespace reference {
// Plain ATen, every device. Waits for none.
C10_EXPORT void check_finite(at::TensorList tensors, const at::Tensor& count);
}  // namespace reference

}  // namespace commhook
