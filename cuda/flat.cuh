// All values of tensors in one flat float32 tensor, for codecs that read them more than once.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "bucket_launch.h"
#include "ops/bucket/bucket.h"
#include "partition.h"
#include "quad.h"
#include "sources.h"

namespace commhook::cuda {

// Writes flat values, scaled, into tensors.
inline void give_flat(const char* op, const at::Tensor& flat, at::TensorList tensors,
                      float scale = 1.0f) {
  const Destinations destinations(op, tensors);
  // A float64 tensor also receives the product in float32.
  const bool takes_product = std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return tensor.scalar_type() == at::kDouble;
  });
  if (scale != 1.0f && takes_product) {
    flat.mul_(static_cast<double>(scale));
    scale = 1.0f;
  }
  launch_unflatten_into(flat, destinations.segments(), scale);
  destinations.finish();
}

// Calls visit(first) for each four values of this thread.
template <typename Visit>
__device__ void for_each_quad(int64_t numel, const Visit& visit) {
  const int64_t stride = int64_t{gridDim.x} * kThreads * kQuadValues;
  for (int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kQuadValues; first < numel;
       first += stride) {
    visit(first);
  }
}

}  // namespace commhook::cuda
