// Matrices as products of thin factors: the operators of PowerSGD, and their kernels in plain ATen
// for high ranks and devices other than the CPU. torch_commhook/hooks/low_rank.py uses them.
//
// PowerSGD's steps multiply matrices as large as the gradients by a few vectors. Each matrix should
// pass through memory only once. So three kernels (csrc/ops/low_rank) each fuse several passes: add
// the gradients to the errors and multiply; multiply and keep the error; multiply and write with
// non-temporal stores. Each partial sum has its place in a row or a column, so neither threads nor
// instruction sets change a bit. Other devices use ATen's batched products.
#include "ops/low_rank/low_rank.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

#include "ops/bucket/bucket_dtype.h"
#include "ops/codecs/codec_checks.h"
#include "ops/cpu/capability.h"
#include "ops/memory_check.h"
#include "ops/mutation.h"
#include "ops/type_names.h"

namespace commhook::low_rank {
namespace {

// ---- checks: each throws an error that names the operator, the argument, its contract and the
// ---- value

void check_dense(const char* op, const char* argument, int64_t index, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined() && tensor.layout() == at::kStrided, op, ": ",
                   argument_name(argument, index), " must be dense (torch.strided), got layout ",
                   tensor.defined() ? layout_name(tensor.layout()) : "None");
  check_memory(op, argument, index, tensor);
}

// Dense, of three dimensions; each matrix is row-major and overlaps no other.
void check_matrices(const char* op, const at::Tensor& matrices) {
  constexpr const char* kName = "matrices";
  check_dense(op, kName, -1, matrices);
  const auto dtype = matrices.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, op,
                   ": matrices must be of dtype float32 or float64, got ", dtype_name(dtype));
  TORCH_CHECK_VALUE(matrices.dim() == 3, op,
                    ": matrices must have three dimensions, (matrices, rows, columns), got sizes ",
                    matrices.sizes());
  const auto sizes = matrices.sizes();
  const auto strides = matrices.strides();
  const bool is_stack = (sizes[2] <= 1 || strides[2] == 1) &&
                        (sizes[1] <= 1 || strides[1] == sizes[2]) &&
                        (sizes[0] <= 1 || strides[0] >= sizes[1] * sizes[2]);
  TORCH_CHECK_VALUE(matrices.numel() == 0 || is_stack, op,
                    ": matrices must be row-major, one after the other, got sizes ", sizes,
                    " with strides ", strides);
}

// Of sizes [matrices, rank, length], contiguous, with the matrices' device and dtype.
void check_factor(const char* op, const char* argument, const at::Tensor& factor, int64_t rank,
                  int64_t length, const at::Tensor& matrices) {
  check_dense(op, argument, -1, factor);
  TORCH_CHECK_TYPE(factor.scalar_type() == matrices.scalar_type(), op, ": ", argument,
                   " must have the matrices' dtype, ", dtype_name(matrices.scalar_type()), ", got ",
                   dtype_name(factor.scalar_type()));
  codecs::check_device(op, argument, factor, matrices.device());
  const std::vector<int64_t> sizes{matrices.size(0), rank, length};
  TORCH_CHECK_VALUE(rank >= 1 && factor.sizes() == sizes && factor.is_contiguous(), op, ": ",
                    argument, " must be contiguous, of sizes ", at::IntArrayRef(sizes),
                    ", with a rank of at least 1, got sizes ", factor.sizes(), " with strides ",
                    factor.strides());
}

void check_all(const char* op, const at::Tensor& matrices, const at::Tensor& left,
               const at::Tensor& right) {
  check_matrices(op, matrices);
  TORCH_CHECK_VALUE(left.dim() == 3, op, ": left must have three dimensions, got sizes ",
                    left.sizes());
  check_factor(op, "left", left, left.size(1), matrices.size(1), matrices);
  check_factor(op, "right", right, left.size(1), matrices.size(2), matrices);
  codecs::check_apart(op, "left", left, "matrices", -1, matrices);
  codecs::check_apart(op, "right", right, "matrices", -1, matrices);
  codecs::check_apart(op, "left", left, "right", -1, right);
}

void check_gradients(const char* op, at::TensorList gradients, const at::Tensor& matrices) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(gradients.size()) == matrices.size(0), op,
                    ": gradients must be one for each of ", matrices.size(0), " matrices, got ",
                    gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const auto& gradient = gradients[i];
    const auto name = argument_name("gradients", index);
    check_dense(op, "gradients", index, gradient);
    TORCH_CHECK_TYPE(is_bucket_dtype(gradient.scalar_type()), op, ": ", name,
                     " must be of dtype float64, float32, float16 or bfloat16, got ",
                     dtype_name(gradient.scalar_type()));
    codecs::check_device(op, name.c_str(), gradient, matrices.device());
    TORCH_CHECK_VALUE(gradient.sizes() == matrices.sizes().slice(1) && gradient.is_contiguous(), op,
                      ": ", name, " must be contiguous, of sizes ", matrices.sizes().slice(1),
                      ", got sizes ", gradient.sizes(), " with strides ", gradient.strides());
    codecs::check_apart(op, "matrices", matrices, "gradients", index, gradient);
  }
}

bool has_kernels(const at::Tensor& matrices, const at::Tensor& left) {
  return cpu::serve(matrices.device()) && left.size(1) <= kMostRank;
}

// ---- the operators -----------------------------------------------------------------------------

void multiply_reference(const at::Tensor& matrices, const at::Tensor& right,
                        const at::Tensor& left) {
  auto out = left;
  at::bmm_out(out, right, matrices.transpose(1, 2));
}

void low_rank_left(const at::Tensor& matrices, const at::Tensor& right, const at::Tensor& left) {
  check_all("low_rank_left", matrices, left, right);
  if (has_kernels(matrices, left)) {
    return left_on_cpu(matrices, right, left);
  }
  multiply_reference(matrices, right, left);
}

void low_rank_gather_left(at::TensorList gradients, const at::Tensor& matrices,
                          const at::Tensor& right, const at::Tensor& left, bool adds) {
  constexpr const char* kName = "low_rank_gather_left";
  check_all(kName, matrices, left, right);
  check_gradients(kName, gradients, matrices);
  for (size_t i = 0; i < gradients.size(); ++i) {
    codecs::check_apart(kName, "left", left, "gradients", static_cast<int64_t>(i), gradients[i]);
  }
  if (has_kernels(matrices, left)) {
    return gather_left_on_cpu(gradients, matrices, right, left, adds);
  }
  if (!gradients.empty()) {
    auto each = matrices.unbind();
    if (adds) {
      at::_foreach_add_(each, gradients);
    } else {
      at::_foreach_copy_(each, gradients);
    }
  }
  multiply_reference(matrices, right, left);
}

void right_reference(const at::Tensor& matrices, const at::Tensor& left, const at::Tensor& right) {
  auto out = right;
  at::bmm_out(out, left, matrices);
}

void low_rank_right(const at::Tensor& matrices, const at::Tensor& left, const at::Tensor& right) {
  check_all("low_rank_right", matrices, left, right);
  if (has_kernels(matrices, left)) {
    return right_on_cpu(matrices, left, right, /*subtracts=*/false);
  }
  right_reference(matrices, left, right);
}

void low_rank_right_error(const at::Tensor& matrices, const at::Tensor& left,
                          const at::Tensor& right) {
  check_all("low_rank_right_error", matrices, left, right);
  if (has_kernels(matrices, left)) {
    return right_on_cpu(matrices, left, right, /*subtracts=*/true);
  }
  right_reference(matrices, left, right);
  matrices.baddbmm_(left.transpose(1, 2), right, /*beta=*/1, /*alpha=*/-1);
}

void low_rank_product(const at::Tensor& left, const at::Tensor& right, const at::Tensor& matrices) {
  check_all("low_rank_product", matrices, left, right);
  if (has_kernels(matrices, left)) {
    return product_on_cpu(left, right, matrices);
  }
  auto out = matrices;
  at::bmm_out(out, left.transpose(1, 2), right);
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.hooks.low_rank");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // Matrices of one shape, (matrices, rows, columns), and their factors, transposed and contiguous,
  // (matrices, rank, rows) and (matrices, rank, columns).

  // left = matrices * right.
  m.def("low_rank_left(Tensor matrices, Tensor right, Tensor(a!) left) -> ()", compliant);
  // The same, after the gradients are written to the matrices or added to them.
  m.def(
      "low_rank_gather_left(Tensor[] gradients, Tensor(a!) matrices, Tensor right, "
      "Tensor(b!) left, *, bool adds=False) -> ()",
      compliant);
  // right = matrices' * left.
  m.def("low_rank_right(Tensor matrices, Tensor left, Tensor(a!) right) -> ()", compliant);
  // The same; also subtracts left * right' from the matrices.
  m.def("low_rank_right_error(Tensor(a!) matrices, Tensor left, Tensor(b!) right) -> ()",
        compliant);
  // matrices = left * right'.
  m.def("low_rank_product(Tensor left, Tensor right, Tensor(a!) matrices) -> ()", compliant);
}

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("low_rank_left", low_rank_left);
  m.impl("low_rank_gather_left", low_rank_gather_left);
  m.impl("low_rank_right", low_rank_right);
  m.impl("low_rank_right_error", low_rank_right_error);
  m.impl("low_rank_product", low_rank_product);
}

}  // namespace
}  // namespace commhook::low_rank

COMMHOOK_MUTATING_OPERATOR(commhook, "low_rank_left")
COMMHOOK_MUTATING_OPERATOR(commhook, "low_rank_gather_left")
COMMHOOK_MUTATING_OPERATOR(commhook, "low_rank_right")
COMMHOOK_MUTATING_OPERATOR(commhook, "low_rank_right_error")
COMMHOOK_MUTATING_OPERATOR(commhook, "low_rank_product")
