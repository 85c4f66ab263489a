// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): random
// numbers as a function of a counter and a key, for host and device.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

namespace commhook {

// One round, in place.
COMMHOOK_HOST_DEVICE void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3,
                                       uint32_t key0, uint32_t key1) {
  const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
  const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
  c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
  c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
  c1 = static_cast<uint32_t>(product1);
  c3 = static_cast<uint32_t>(product0);
}

// Replaces a counter by four random words. Has no loop: compilers would not vectorise counters with
// one.
COMMHOOK_HOST_DEVICE void philox(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3,
                                 uint32_t key0, uint32_t key1) {
  constexpr uint32_t kWeyl0 = 0x9E3779B9u;
  constexpr uint32_t kWeyl1 = 0xBB67AE85u;
  philox_round(c0, c1, c2, c3, key0, key1);
  philox_round(c0, c1, c2, c3, key0 + kWeyl0, key1 + kWeyl1);
  philox_round(c0, c1, c2, c3, key0 + 2 * kWeyl0, key1 + 2 * kWeyl1);
  philox_round(c0, c1, c2, c3, key0 + 3 * kWeyl0, key1 + 3 * kWeyl1);
  philox_round(c0, c1, c2, c3, key0 + 4 * kWeyl0, key1 + 4 * kWeyl1);
  philox_round(c0, c1, c2, c3, key0 + 5 * kWeyl0, key1 + 5 * kWeyl1);
  philox_round(c0, c1, c2, c3, key0 + 6 * kWeyl0, key1 + 6 * kWeyl1);
  philox_round(c0, c1, c2, c3, key0 + 7 * kWeyl0, key1 + 7 * kWeyl1);
  philox_round(c0, c1, c2, c3, key0 + 8 * kWeyl0, key1 + 8 * kWeyl1);
  philox_round(c0, c1, c2, c3, key0 + 9 * kWeyl0, key1 + 9 * kWeyl1);
}

}  // namespace commhook
