// All values of tensors in one, flat and float32, for codecs that look at them more than once.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include "bucket_launch.h"
#include "ops/bucket/bucket.h"
#include "partition.h"
#include "quad.h"
#include "sources.h"

namespace commhook::cuda {

inline at::Tensor flat_of(const char* op, at::TensorList tensors) {
  auto flat = at::empty({total_numel(tensors)}, tensors[0].options().dtype(at::kFloat));
  launch_flatten(Sources(op, tensors).segments(), 1.0, flat);
  return flat;
}

inline void give_flat(const char* op, const at::Tensor& flat, at::TensorList tensors) {
  const Destinations destinations(op, tensors);
  launch_unflatten_into(flat, destinations.segments(), 1.0);
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

// p = values * scale + error, of four values. error: null for none.
__device__ inline Quad compensated_quad(const float* values, float scale, const float* error,
                                        int64_t first, int64_t numel) {
  Quad p = quad_at(values, first, numel, true);
  Quad lost = {};
  if (error != nullptr) {
    lost = quad_at(error, first, numel, is_aligned_for_quads(error));
  }
#pragma unroll
  for (int i = 0; i < kQuadValues; ++i) {
    p.values[i] = p.values[i] * scale;
    if (error != nullptr) {
      p.values[i] = p.values[i] + lost.values[i];
    }
  }
  return p;
}

}  // namespace commhook::cuda
