// Shared by the kernels of check_finite.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <vector>

namespace commhook {

// Throws an error that names the operator, the argument, its contract and the value.
// tensors: dense or sparse, on the device of count. count: dense, int64, one element.
C10_EXPORT void check_finite_arguments(at::TensorList tensors, const at::Tensor& count);

// The tensors, separated by the way they are checked.
struct Checked {
  // Tensors of dtypes that have kernels. A tensor without gaps in memory is one row, in any order:
  // counting does not depend on it.
  std::vector<at::Tensor> rows;
  std::vector<at::Tensor> others;
};
C10_EXPORT Checked split_by_dtype(at::TensorList tensors);

namespace reference {
// Plain ATen, for every device. Does not wait for the device.
C10_EXPORT void check_finite(at::TensorList tensors, const at::Tensor& count);
}  // namespace reference

}  // namespace commhook
