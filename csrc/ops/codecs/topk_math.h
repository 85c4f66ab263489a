// Which values are the largest, for host and device.
#pragma once

#include <cstdint>

#include "ops/codecs/float_bits.h"
#include "ops/host_device.h"

namespace commhook::topk {

// By which values are chosen, the largest first: that of a NaN is above all others.
COMMHOOK_HOST_DEVICE int32_t rank_of(float value) {
  const uint32_t magnitude = bits_of(value) & kAbsolute;
  return static_cast<int32_t>(magnitude > kInfinity ? kInfinity + 1 : magnitude);
}

// As it is sent: the bits of a NaN depend on the instructions that made it.
COMMHOOK_HOST_DEVICE float sent(float value) {
  return rank_of(value) > static_cast<int32_t>(kInfinity) ? float_of(kNaN) : value;
}

}  // namespace commhook::topk
