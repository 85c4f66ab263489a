// An error of 16 bits in the error memory, for host and device: the upper half of a float32
// (bfloat16), rounded when it is written. Kernels compute with float32.
#pragma once

#include <cstdint>

#include "ops/codecs/float_bits.h"
#include "ops/host_device.h"

namespace commhook::codecs {

COMMHOOK_HOST_DEVICE float widened(uint16_t half) { return float_of(uint32_t{half} << 16); }

// addend: added to the magnitude before the lower half is cut off. A value that is too large
// becomes the largest finite one, since an error must stay finite.
COMMHOOK_HOST_DEVICE uint16_t narrowed(float value, uint32_t addend) {
  constexpr uint32_t kMost = 0x7f7fffffu;
  const uint32_t bits = bits_of(value);
  uint32_t magnitude = (bits & kAbsolute) + addend;
  magnitude = magnitude > kMost ? kMost : magnitude;
  return static_cast<uint16_t>((magnitude | (bits & ~kAbsolute)) >> 16);
}

// Rounds to the nearest value, ties to even.
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

// The key of a step's random numbers. A number also depends on the element's place.
COMMHOOK_HOST_DEVICE uint32_t noise_key(uint32_t seed0, uint32_t seed1, uint32_t step) {
  return scrambled(seed0 ^ scrambled(seed1 ^ scrambled(step)));
}

// Rounds to one of the two neighbouring values, with a probability that makes the mean exact. A
// value that fits in 16 bits stays as it is.
COMMHOOK_HOST_DEVICE uint16_t rounded_at_random(float value, uint32_t place, uint32_t key) {
  return narrowed(value, scrambled(place + key) >> 16);
}

}  // namespace commhook::codecs
