// The bucket operators on CUDA: one pass over memory; warps share elements, not tensors. Each
// launch takes up to about two thousand tensors.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "bucket_launch.h"
#include "ops/bucket/bucket.h"
#include "sources.h"

namespace commhook::cuda {
namespace {

at::Tensor flatten(at::TensorList tensors, double scale, std::optional<at::ScalarType> dtype) {
  const auto to = check_flatten("flatten", tensors, dtype);
  const c10::cuda::CUDAGuard guard(tensors[0].device());
  auto buffer = at::empty({total_numel(tensors)}, tensors[0].options().dtype(to));
  launch_flatten(Sources("flatten", tensors).segments(), scale, buffer);
  return buffer;
}

at::Tensor& flatten_out(at::TensorList tensors, double scale, at::Tensor& out) {
  check_flatten_out("flatten", tensors, out);
  check_aligned("flatten", "out", -1, out);
  const c10::cuda::CUDAGuard guard(out.device());
  launch_flatten(Sources("flatten", tensors).segments(), scale, out);
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flatten_stats(at::TensorList tensors, double scale,
                                                             std::optional<at::ScalarType> dtype) {
  const auto to = check_flatten("flatten_stats", tensors, dtype);
  const c10::cuda::CUDAGuard guard(tensors[0].device());
  const auto options = tensors[0].options();
  auto buffer = at::empty({total_numel(tensors)}, options.dtype(to));
  auto sum_of_squares = at::empty({}, options.dtype(at::kDouble));
  auto nonfinite_count = at::empty({}, options.dtype(at::kLong));
  launch_flatten_stats(Sources("flatten_stats", tensors).segments(), scale, buffer, sum_of_squares,
                       nonfinite_count);
  return {std::move(buffer), std::move(sum_of_squares), std::move(nonfinite_count)};
}

void run_unflatten(const char* op, const at::Tensor& buffer, at::TensorList tensors, double scale) {
  check_aligned(op, "buffer", -1, buffer);
  const c10::cuda::CUDAGuard guard(buffer.device());
  const Destinations destinations(op, tensors);
  launch_unflatten_into(buffer, destinations.segments(), scale);
  destinations.finish();
}

std::vector<at::Tensor> unflatten(const at::Tensor& buffer, at::TensorList like, double scale) {
  check_unflatten("unflatten", buffer, like, "like");
  auto tensors = empty_like(like);
  run_unflatten("unflatten", buffer, tensors, scale);
  return tensors;
}

void unflatten_into(const at::Tensor& buffer, at::TensorList tensors, double scale) {
  check_unflatten_into("unflatten_into", buffer, tensors);
  run_unflatten("unflatten_into", buffer, tensors, scale);
}

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  m.impl("flatten", flatten);
  m.impl("flatten.out", flatten_out);
  m.impl("flatten_stats", flatten_stats);
  m.impl("unflatten", unflatten);
  m.impl("unflatten_into", unflatten_into);
}

}  // namespace
}  // namespace commhook::cuda
