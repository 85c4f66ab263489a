// Matrices and their factors: shared by the operators' kernels.
//
// Matrices of one shape form a stack, [matrices, rows, columns]. Each is row-major, with any
// distance from one to the next. Factors are transposed and contiguous: [matrices, rank, rows] and
// [matrices, rank, columns]. All are float32 or float64.
#pragma once

#include <ATen/core/Tensor.h>

namespace commhook::low_rank {

// The CPU has kernels up to this rank, which go through memory once. Beyond it, ATen's products are
// faster: they use each number that they read many times.
constexpr int64_t kMostRank = 8;

// left = matrices * right.
void left_on_cpu(const at::Tensor& matrices, const at::Tensor& right, const at::Tensor& left);
// Writes the gradients to the matrices, or adds them; then computes left as above.
void gather_left_on_cpu(at::TensorList gradients, const at::Tensor& matrices,
                        const at::Tensor& right, const at::Tensor& left, bool adds);
// right = matrices' * left; with `subtracts`, then matrices -= left * right'.
void right_on_cpu(const at::Tensor& matrices, const at::Tensor& left, const at::Tensor& right,
                  bool subtracts);
// matrices = left * right'.
void product_on_cpu(const at::Tensor& left, const at::Tensor& right, const at::Tensor& matrices);

}  // namespace commhook::low_rank
