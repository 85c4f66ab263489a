#include <algorithm>

#include "error_launch.h"
#include "flat.cuh"
#include "launch.cuh"
#include "ops/codecs/error_math.h"

namespace commhook::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    narrow_error_kernel(const float* values, int64_t numel, const int64_t* rounding, uint16_t* to) {
  const bool is_aligned = is_aligned_for_quads(values);
  uint32_t key = 0;
  if (rounding != nullptr) {
    const auto seed = static_cast<uint64_t>(rounding[0]);
    key = codecs::noise_key(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                            static_cast<uint32_t>(rounding[1]));
  }
  for_each_quad(numel, [&](int64_t first) {
    const Quad quad = quad_at(values, first, numel, is_aligned);
#pragma unroll
    for (int i = 0; i < kQuadValues; ++i) {
      if (first + i < numel) {
        const float value = quad.values[i];
        to[first + i] = rounding == nullptr ? codecs::nearest(value)
                                            : codecs::rounded_at_random(
                                                  value, static_cast<uint32_t>(first + i), key);
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
  const auto blocks = static_cast<unsigned>(
      std::min<int64_t>((numel + kEach - 1) / kEach,
                        int64_t{at::cuda::getCurrentDeviceProperties()->multiProcessorCount} * 8));
  narrow_error_kernel<<<blocks, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      values.const_data_ptr<float>(), numel, rounding,
      static_cast<uint16_t*>(error.mutable_data_ptr()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace commhook::cuda
