// Sums over the rows of a matrix, in float32 and in order. Each row holds one rank's 16-bit values;
// an all-reduce would round every partial sum of these.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/bucket/bucket_dtype.h"
#include "ops/codecs/codec_checks.h"
#include "ops/cpu/capability.h"
#include "ops/cpu/row_kernels.h"
#include "ops/memory_check.h"
#include "ops/mutation.h"
#include "ops/type_names.h"

namespace commhook {
namespace {

constexpr const char* kName = "sum_rows";
// With fewer elements, waking a thread costs more than it saves.
constexpr int64_t kGrainElements = 64 * 1024;
// Columns that are added at once: their sums and one row's values stay in the first-level cache.
constexpr int64_t kColumns = 2048;

void check_dense(const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined() && tensor.layout() == at::kStrided, kName, ": ", argument,
                   " must be dense (torch.strided), got layout ",
                   tensor.defined() ? layout_name(tensor.layout()) : "None");
  check_memory(kName, argument, -1, tensor);
}

void check_arguments(const at::Tensor& rows, const at::Tensor& out) {
  check_dense("rows", rows);
  check_dense("out", out);
  const auto dtype = rows.scalar_type();
  TORCH_CHECK_TYPE(is_bucket_dtype(dtype) && dtype != at::kDouble, kName,
                   ": rows must be of dtype float32, float16 or bfloat16, got ", dtype_name(dtype));
  TORCH_CHECK_TYPE(is_bucket_dtype(out.scalar_type()), kName,
                   ": out must be of dtype float64, float32, float16 or bfloat16, got ",
                   dtype_name(out.scalar_type()));
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && rows.size(0) >= 1 && rows.is_contiguous(), kName,
      ": rows must be contiguous, of two dimensions, with one row or more, got sizes ",
      rows.sizes(), " with strides ", rows.strides());
  TORCH_CHECK_VALUE(out.dim() == 1 && out.numel() == rows.size(1) && out.is_contiguous(), kName,
                    ": out must be contiguous, of sizes [", rows.size(1), "], got sizes ",
                    out.sizes(), " with strides ", out.strides());
  codecs::check_device(kName, "out", out, rows.device());
  codecs::check_apart(kName, "out", out, "rows", -1, rows);
}

void sum_on_cpu(const at::Tensor& rows, const at::Tensor& out) {
  const auto& kernels = cpu::row_kernels(cpu::capability());
  const auto to_float =
      kernels.plain[cpu::dtype_index(rows.scalar_type())][cpu::dtype_index(at::kFloat)];
  const auto from_float =
      kernels.plain[cpu::dtype_index(at::kFloat)][cpu::dtype_index(out.scalar_type())];
  const int64_t count = rows.size(0);
  const int64_t columns = rows.size(1);
  const auto row_bytes = columns * rows.element_size();
  const auto* const source = static_cast<const char*>(rows.const_data_ptr());
  auto* const destination = static_cast<char*>(out.mutable_data_ptr());
  const auto grain = std::max<int64_t>(1, kGrainElements / count);
  at::parallel_for(0, columns, grain, [&](int64_t begin, int64_t end) {
    float sums[kColumns];
    float values[kColumns];
    for (int64_t first = begin; first < end; first += kColumns) {
      const auto n = std::min(kColumns, end - first);
      const auto* row = source + first * rows.element_size();
      to_float(row, sums, n, 1.0, nullptr);
      for (int64_t i = 1; i < count; ++i) {
        row += row_bytes;
        to_float(row, values, n, 1.0, nullptr);
        for (int64_t j = 0; j < n; ++j) {
          sums[j] += values[j];
        }
      }
      from_float(sums, destination + first * out.element_size(), n, 1.0, nullptr);
    }
  });
}

void sum_rows(const at::Tensor& rows, const at::Tensor& out) {
  check_arguments(rows, out);
  if (out.numel() == 0) {
    return;
  }
  if (cpu::serve(rows.device())) {
    return sum_on_cpu(rows, out);
  }
  if (!rows.is_cpu()) {  // in one call; the device chooses the order
    out.copy_(at::sum(rows, {0}, /*keepdim=*/false, at::kFloat));
    return;
  }
  auto sums = rows[0].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  for (int64_t i = 1; i < rows.size(0); ++i) {
    sums.add_(rows[i]);
  }
  out.copy_(sums);
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.collectives.plain");

  // out = the sum of the rows, in float32 and in their order, rounded once.
  m.def("sum_rows(Tensor rows, Tensor(a!) out) -> ()", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) { m.impl("sum_rows", sum_rows); }

}  // namespace
}  // namespace commhook

COMMHOOK_MUTATING_OPERATOR(commhook, "sum_rows")
