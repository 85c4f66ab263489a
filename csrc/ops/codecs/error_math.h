// A remembered error of 16 bits, for host and device: the upper half of a float32 (bfloat16), to
// which the error is rounded when it is written. Kernels compute with float32.
#pragma once

#include <cstdint>

#include "ops/codecs/float_bits.h"
#include "ops/host_device.h"

namespace commhook::codecs {

COMMHOOK_HOST_DEVICE float widened(uint16_t half) { return float_of(uint32_t{half} << 16); }

// addend: what is added to the magnitude before its lower half is cut off. What is too large
// becomes the largest finite value, since an error must stay finite.
COMMHOOK_HOST_DEVICE uint16_t narrowed(float value, uint32_t addend) {
  constexpr uint32_t kMost = 0x7f7fffffu;
  const uint32_t bits = bits_of(value);
  uint32_t magnitude = (bits & kAbsolute) + addend;
  magnitude = magnitude > kMost ? kMost : magnitude;
  return static_cast<uint16_t>((magnitude | (bits & ~kAbsolute)) >> 16);
}

// To the nearest value, of two the even one.
COMMHOOK_HOST_DEVICE uint16_t nearest(float value) {
  return narrowed(value, 0x7fffu + ((bits_of(value) >> 16) & 1u));
}

// Scrambles 32 bits (C. Wellons, "Prospecting for hash functions", 2018).
COMMHOOK_HOST_DEVICE uint32_t scrambled(uint32_t bits) {
  bits ^= bits >> 16;
  bits *= 0x7feb352du;
  bits ^= bits >> 15;
  bits *= 0x846ca68bu;
  return bits ^ (bits >> 16);
}

// What the random numbers of a step follow from, beside the place of an element.
COMMHOOK_HOST_DEVICE uint32_t noise_key(uint32_t seed0, uint32_t seed1, uint32_t step) {
  return scrambled(seed0 ^ scrambled(seed1 ^ scrambled(step)));
}

// To one of the two values beside it, each the likelier the nearer it is, so that the value is
// right on average. Values of 16 bits stay as they are.
COMMHOOK_HOST_DEVICE uint16_t rounded_at_random(float value, uint32_t place, uint32_t key) {
  return narrowed(value, scrambled(place + key) >> 16);
}

}  // namespace commhook::codecs
