// Which values randomk sends, for host and device: the first few of a random permutation of them.
//
// A Feistel network, whose round function is Philox of half an index, permutes [0, 2^bits), the
// least such range that holds all indices. An index that it takes out of [0, numel) is permuted
// until it is back, which leaves a permutation of those (cycle walking: Black and Rogaway, "Ciphers
// with arbitrary finite domains", 2002). All are then moved on by one random number, modulo numel:
// so each value is as likely to be sent as any other, whatever the network is worth.
#pragma once

#include <cstdint>

#include "ops/codecs/philox.h"
#include "ops/host_device.h"

namespace commhook::randomk {

// Networks of fewer bits do not mix well, which costs the few values that would need them little.
constexpr uint32_t kFewestBits = 8;
constexpr uint32_t kRounds = 6;
// Philox's third word, which no other codec of the same seed and step gives it.
constexpr uint32_t kDomain = 0x72646d6bu;

struct Draw {
  uint32_t numel;
  uint32_t low_bits;  // of the lower half of an index
  uint32_t low_mask;
  uint32_t high_mask;
  uint32_t seed0;
  uint32_t seed1;
  uint32_t step;
  uint32_t offset;
};

COMMHOOK_HOST_DEVICE uint32_t random_word(const Draw& draw, uint32_t half, uint32_t round) {
  uint32_t c0 = half;
  uint32_t c1 = round;
  uint32_t c2 = kDomain;
  uint32_t c3 = draw.step;
  philox(c0, c1, c2, c3, draw.seed0, draw.seed1);
  return c0;
}

// numel: less than 2^31.
COMMHOOK_HOST_DEVICE Draw draw_from(int64_t numel, uint32_t seed0, uint32_t seed1, uint32_t step) {
  uint32_t bits = kFewestBits;
  while ((int64_t{1} << bits) < numel) {
    ++bits;
  }
  const uint32_t low_bits = bits / 2;
  Draw draw{static_cast<uint32_t>(numel),
            low_bits,
            (1u << low_bits) - 1,
            (1u << (bits - low_bits)) - 1,
            seed0,
            seed1,
            step,
            0};
  // A fraction of 64 random bits, times numel.
  const uint64_t low = random_word(draw, 0, kRounds);
  const uint64_t high = random_word(draw, 1, kRounds);
  draw.offset = static_cast<uint32_t>((high * draw.numel + (low * draw.numel >> 32)) >> 32);
  return draw;
}

// Without a loop, which compilers would not turn into vectors of indices.
COMMHOOK_HOST_DEVICE uint32_t permuted(const Draw& draw, uint32_t index) {
  uint32_t low = index & draw.low_mask;
  uint32_t high = index >> draw.low_bits;
  low ^= random_word(draw, high, 0) & draw.low_mask;
  high ^= random_word(draw, low, 1) & draw.high_mask;
  low ^= random_word(draw, high, 2) & draw.low_mask;
  high ^= random_word(draw, low, 3) & draw.high_mask;
  low ^= random_word(draw, high, 4) & draw.low_mask;
  high ^= random_word(draw, low, 5) & draw.high_mask;
  static_assert(kRounds == 6);
  return high << draw.low_bits | low;
}

COMMHOOK_HOST_DEVICE uint32_t moved(const Draw& draw, uint32_t index) {
  const uint32_t sum = index + draw.offset;
  return sum >= draw.numel ? sum - draw.numel : sum;
}

// Which value is sent as an entry of the message.
COMMHOOK_HOST_DEVICE uint32_t index_of(const Draw& draw, uint32_t entry) {
  uint32_t index = permuted(draw, entry);
  while (index >= draw.numel) {
    index = permuted(draw, index);
  }
  return moved(draw, index);
}

}  // namespace commhook::randomk
