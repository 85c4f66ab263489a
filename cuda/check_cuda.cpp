// check_finite on CUDA: one pass over memory. Each launch takes up to about two thousand tensors.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "check_launch.h"
#include "ops/check/check.h"
#include "sources.h"

namespace commhook::cuda {
namespace {

void check_finite(at::TensorList tensors, const at::Tensor& count) {
  check_finite_arguments(tensors, count);
  check_aligned("check_finite", "count", -1, count);
  const c10::cuda::CUDAGuard guard(count.device());
  auto [rows, others] = split_by_dtype(tensors);
  reference::check_finite(others, count);
  launch_check_finite(Sources("check_finite", rows).segments(), count);
}

TORCH_LIBRARY_IMPL(commhook, CUDA, m) { m.impl("check_finite", check_finite); }

}  // namespace
}  // namespace commhook::cuda
