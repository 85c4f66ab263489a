// Matrices and their factors: what the operators' kernels share.
//
// Matrices of one shape stand in a stack, [matrices, rows, columns], each row-major, with any
// distance from one to the next. Factors are stored transposed, [matrices, rank, rows] and
// [matrices, rank, columns], and contiguous. All is in float32 or in float64.
#pragma once

#include <ATen/core/Tensor.h>

namespace commhook::low_rank {

// Up to this rank the CPU has kernels. Beyond it ATen's products, which use each number that they
// read many times, are faster than what goes through memory once.
constexpr int64_t kMostRank = 8;

// left = matrices * right.
void left_on_cpu(const at::Tensor& matrices, const at::Tensor& right, const at::Tensor& left);
// matrices = gradients, or += gradients, then as above.
void gather_left_on_cpu(at::TensorList gradients, const at::Tensor& matrices,
                        const at::Tensor& right, const at::Tensor& left, bool adds);
// right = matrices' * left; with `subtracts`, then matrices -= left * right'.
void right_on_cpu(const at::Tensor& matrices, const at::Tensor& left, const at::Tensor& right,
                  bool subtracts);
// matrices = left * right'.
void product_on_cpu(const at::Tensor& left, const at::Tensor& right, const at::Tensor& matrices);

}  // namespace commhook::low_rank
