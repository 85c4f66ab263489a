// The kernels of randomk for one instruction set: see cpu/for_each_instruction_set.h. Plain loops,
// which compilers vectorise.
#include "ops/codecs/block_codec_kernels.inl"

void draw_indices(const Draw& draw, uint32_t first, int64_t n, uint32_t* __restrict indices) {
  alignas(64) uint32_t values[kBatch];
  alignas(64) uint16_t pending[kBatch];
  const Draw own = draw;
  const auto size = static_cast<int32_t>(n);
  for (int32_t i = 0; i < size; ++i) {
    indices[i] = permuted(own, first + static_cast<uint32_t>(i));
  }
  int32_t count = 0;  // of indices beyond the values
  for (int32_t i = 0; i < size; ++i) {
    pending[count] = static_cast<uint16_t>(i);
    count += indices[i] >= own.numel ? 1 : 0;
  }
  while (count > 0) {
    for (int32_t i = 0; i < count; ++i) {
      values[i] = indices[pending[i]];
    }
    for (int32_t i = 0; i < count; ++i) {
      values[i] = permuted(own, values[i]);
    }
    int32_t left = 0;
    for (int32_t i = 0; i < count; ++i) {
      const uint16_t at = pending[i];
      indices[at] = values[i];
      pending[left] = at;
      left += values[i] >= own.numel ? 1 : 0;
    }
    count = left;
  }
  for (int32_t i = 0; i < size; ++i) {
    indices[i] = moved(own, indices[i]);
  }
}

uint32_t compensate(const float* __restrict values, int64_t n, float scale,
                    float* __restrict error) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float p = values[i] * scale + error[i];
    const uint32_t bits = bits_of(p) & kAbsolute;
    largest = bits > largest ? bits : largest;
    error[i] = bits >= kInfinity ? 0.0f : p;
  }
  return largest;
}

uint32_t largest(const float* values, int64_t n, float scale) {
  return bits_of(float_of(largest_magnitude(values, n)) * scale) & kAbsolute;
}

constexpr Kernels kKernels{draw_indices, compensate, largest};
