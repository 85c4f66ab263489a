// Four float32 values in 16 bytes, for host and device.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

namespace commhook::cuda {

constexpr int kQuadBytes = 16;
constexpr int kQuadValues = 4;

struct alignas(kQuadBytes) Quad {
  float values[kQuadValues];
};

COMMHOOK_HOST_DEVICE bool is_aligned_for_quads(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kQuadBytes == 0;
}

COMMHOOK_HOST_DEVICE Quad load_quad(const float* from, bool is_aligned) {
  if (is_aligned) {
    return *reinterpret_cast<const Quad*>(from);
  }
  return {from[0], from[1], from[2], from[3]};
}

COMMHOOK_HOST_DEVICE void store_quad(const Quad& quad, float* to, bool is_aligned) {
  if (is_aligned) {
    *reinterpret_cast<Quad*>(to) = quad;
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuadValues; ++i) {
    to[i] = quad.values[i];
  }
}

// values[first] and the three after it, with zeros for those from `end` on.
COMMHOOK_HOST_DEVICE Quad quad_at(const float* values, int64_t first, int64_t end,
                                  bool is_aligned) {
  if (first + kQuadValues <= end) {
    return load_quad(values + first, is_aligned);
  }
  Quad quad = {};
#pragma unroll
  for (int i = 0; i < kQuadValues; ++i) {
    if (first + i < end) {
      quad.values[i] = values[first + i];
    }
  }
  return quad;
}

}  // namespace commhook::cuda
