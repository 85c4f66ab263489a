// The choice of the values that randomk sends, for host and device: the first few of a random
// permutation.
//
// A Feistel network permutes [0, 2^bits), the smallest such range that holds all indices. Its round
// function is Philox of half an index. An index that leaves [0, numel) is permuted again until it
// returns, which gives a permutation of [0, numel) (cycle walking: Black and Rogaway, "Ciphers with
// arbitrary finite domains", 2002). All indices are then shifted by one random number, modulo
// numel. So each value is equally likely to be sent, however good the network is.
//
// randomk sends no indices, because all ranks permute the values alike, with a Feistel network on
// Philox. It reads all values even if it sends few. If one is infinite or NaN, it sends only NaNs;
// otherwise the NaN would show only if it were drawn.
#pragma once

#include <cstdint>

#include "ops/codecs/philox.h"
#include "ops/host_device.h"

namespace commhook::randomk {

// Networks of fewer bits do not mix well. The larger range costs little, as only a few values would
// fit in fewer bits.
constexpr uint32_t kFewestBits = 8;
constexpr uint32_t kRounds = 6;
// Philox's third word; no other codec with the same seed and step uses it.
constexpr uint32_t kDomain = 0x72646d6bu;

struct Draw {
  uint32_t numel;
  uint32_t low_bits;  // bits of the lower half of an index
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
  // Multiplies a fraction of 64 random bits by numel.
  const uint64_t low = random_word(draw, 0, kRounds);
  const uint64_t high = random_word(draw, 1, kRounds);
  draw.offset = static_cast<uint32_t>((high * draw.numel + (low * draw.numel >> 32)) >> 32);
  return draw;
}

// Has no loop: compilers would not vectorise indices with one.
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

// The index of the value that an entry of the message holds.
COMMHOOK_HOST_DEVICE uint32_t index_of(const Draw& draw, uint32_t entry) {
  uint32_t index = permuted(draw, entry);
  while (index >= draw.numel) {
    index = permuted(draw, index);
  }
  return moved(draw, index);
}

}  // namespace commhook::randomk
