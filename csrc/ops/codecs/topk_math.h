// The order of values by magnitude, for host and device.
#pragma once

#include <cstdint>

#include "ops/codecs/float_bits.h"
#include "ops/host_device.h"

namespace commhook::topk {

// Values are chosen by rank, the largest first. The rank of a NaN is above all others.
COMMHOOK_HOST_DEVICE int32_t rank_of(float value) {
  const uint32_t magnitude = bits_of(value) & kAbsolute;
  return static_cast<int32_t>(magnitude > kInfinity ? kInfinity + 1 : magnitude);
}

// The value as it is sent: a NaN has fixed bits, which would otherwise depend on the instructions
// that made it.
COMMHOOK_HOST_DEVICE float sent(float value) {
  return rank_of(value) > static_cast<int32_t>(kInfinity) ? float_of(kNaN) : value;
}

}  // namespace commhook::topk
