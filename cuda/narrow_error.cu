#include <algorithm>

#include "error_launch.h"
#include "flat.cuh"
#include "launch.cuh"
#include "rounding.cuh"

namespace commhook::cuda {
namespace {

// Four values of 16 bits, in one store.
struct alignas(8) NarrowQuad {
  uint16_t values[kQuadValues];
};

__global__ void __launch_bounds__(kThreads)
    narrow_error_kernel(const float* values, int64_t numel, const int64_t* rounding, uint16_t* to) {
  const bool is_aligned = is_aligned_for_quads(values);
  const auto round = narrow_rounding(rounding);
  const bool writes_quads = reinterpret_cast<uintptr_t>(to) % sizeof(NarrowQuad) == 0;
  for_each_quad(numel, [&](int64_t first) {
    const Quad quad = quad_at(values, first, numel, is_aligned);
    NarrowQuad narrow;
#pragma unroll
    for (int i = 0; i < kQuadValues; ++i) {
      narrow.values[i] = round(quad.values[i], first + i);
    }
    if (writes_quads && first + kQuadValues <= numel) {
      *reinterpret_cast<NarrowQuad*>(to + first) = narrow;
      return;
    }
#pragma unroll
    for (int i = 0; i < kQuadValues; ++i) {
      if (first + i < numel) {
        to[first + i] = narrow.values[i];
      }
    }
  });
}

}  // namespace

void launch_narrow_error(const at::Tensor& values, const int64_t* rounding,
                         const at::Tensor& error) {
  const int64_t numel = values.numel();
  if (numel == 0) {
    return;
  }
  constexpr int64_t kEach = int64_t{kThreads} * kQuadValues;
  const int most = at::cuda::getCurrentDeviceProperties()->multiProcessorCount * 8;
  const auto blocks = std::min(blocks_for(numel, kEach), static_cast<unsigned>(most));
  narrow_error_kernel<<<blocks, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      values.const_data_ptr<float>(), numel, rounding,
      static_cast<uint16_t*>(error.mutable_data_ptr()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace commhook::cuda
