// All values of tensors in one, flat and float32, for codecs that look at them more than once.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include "bucket_launch.h"
#include "ops/bucket.h"
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

}  // namespace commhook::cuda
