// The largest values of each chunk in few bits: the form of a message, the choice of values, and
// their levels. For host and device; integers, so that all kernels give the same bits.
//
// chunk_topk selects from 4,096 values while they stay in the first-level cache. It takes the
// largest value of each of 256 groups. The 64th largest of these is a threshold that at least 64
// values reach, usually about 75. Bisection among these finds the values to send. All sums of
// magnitudes are sums of integers, so their order changes no bit
// (csrc/ops/codecs/chunk_topk_math.h).
#pragma once

#include <cstdint>

#include "ops/codecs/error_math.h"
#include "ops/codecs/float_bits.h"
#include "ops/host_device.h"

namespace commhook::chunk_topk {

constexpr int kLeastChunk = 64;
constexpr int kLargestChunk = 4096;
constexpr uint32_t kWordBits = 32;

// A message has one part for each chunk, in whole words of 32 bits. A part holds the levels, then
// the ascending places of the entries, `place_bits` each, then their codes, `bits` each. Fields
// follow each other from the lowest bit of the first word on. If fewer values than entries are not
// zero, the last place repeats; decoders skip the repetitions.
struct Form {
  int k;
  int chunk;  // values; a power of two
  int place_bits;
  int bits;  // bits of a code: the sign above the number of the level

  // The entries of a chunk of `count` values.
  COMMHOOK_HOST_DEVICE int entries(int64_t count) const {
    return static_cast<int>(count < k ? count : k);
  }
  COMMHOOK_HOST_DEVICE int place_words(int entries) const {
    return (entries * place_bits + 31) / 32;
  }
  COMMHOOK_HOST_DEVICE int words(int entries) const {
    return entries == 0 ? 0 : 1 + place_words(entries) + (entries * bits + 31) / 32;
  }
  COMMHOOK_HOST_DEVICE int64_t bytes(int64_t numel) const {
    const int64_t whole = numel / chunk;
    return 4 * (whole * words(k) + words(entries(numel - whole * chunk)));
  }
};

// Values are chosen by rank, the largest first. The rank of a NaN is above all others; 0 is not
// sent.
COMMHOOK_HOST_DEVICE int32_t rank_of(float value) {
  const auto magnitude = static_cast<int32_t>(bits_of(value) & kAbsolute);
  constexpr auto kMost = static_cast<int32_t>(kInfinity) + 1;
  return magnitude < kMost ? magnitude : kMost;
}

// ---- levels ------------------------------------------------------------------------------------

// The word of a chunk that has an infinity or a NaN: its levels are NaN.
constexpr uint32_t kNoLevels = 0x7fc07fc0u;

// The lowest and the highest level, each the upper half of a float32 (bfloat16).
COMMHOOK_HOST_DEVICE uint32_t levels_word(uint32_t low, uint32_t high) { return low | high << 16; }
COMMHOOK_HOST_DEVICE uint32_t low_level(uint32_t word) { return word << 16; }
COMMHOOK_HOST_DEVICE uint32_t high_level(uint32_t word) { return word & 0xffff0000u; }

// The number of levels above the lowest.
COMMHOOK_HOST_DEVICE constexpr uint32_t steps_of(int bits) { return (1u << (bits - 1)) - 1u; }

// The difference between the levels' bits, in units of 2^8. Its product with the number of a level
// fits in 32 bits.
COMMHOOK_HOST_DEVICE uint32_t span_of(uint32_t word) {
  return (high_level(word) - low_level(word)) >> 8;
}

// For more than one bit of magnitude: the levels around the least and the largest rank. A level is
// finite.
COMMHOOK_HOST_DEVICE uint32_t outer_levels(int32_t least, int32_t largest) {
  const uint32_t high = (static_cast<uint32_t>(largest) + 0xffffu) >> 16;
  return levels_word(static_cast<uint32_t>(least) >> 16, high < 0x7f7fu ? high : 0x7f7fu);
}

// The code of a value. Levels are spread evenly between the bits of the lowest and of the highest
// level, which is nearly logarithmic. The value takes the nearer of the two levels around it.
COMMHOOK_HOST_DEVICE uint32_t code_of(float value, uint32_t word, int bits) {
  const uint32_t magnitude = bits_of(value) & kAbsolute;
  const uint32_t sign = (bits_of(value) >> 31) << (bits - 1);
  if (bits == 2) {
    const float middle = 0.5f * float_of(low_level(word)) + 0.5f * float_of(high_level(word));
    return sign | (float_of(magnitude) > middle ? 1u : 0u);
  }
  const uint32_t low = low_level(word);
  const uint32_t span = span_of(word);
  if (span == 0) {
    return sign;
  }
  const uint32_t steps = steps_of(bits);
  const uint32_t above = magnitude > low ? (magnitude - low) >> 8 : 0;
  const uint32_t number = (above * steps + span / 2) / span;
  return sign | (number < steps ? number : steps);
}

// A zero has no sign, so that sums do not depend on which messages contain it.
COMMHOOK_HOST_DEVICE float value_of(uint32_t code, uint32_t word, int bits) {
  const uint32_t steps = steps_of(bits);
  const uint32_t number = code & steps;
  const uint32_t magnitude = low_level(word) + ((span_of(word) * number + steps / 2) / steps << 8);
  return float_of(magnitude == 0 ? 0 : magnitude | (code >> (bits - 1)) << 31);
}

// ---- two levels --------------------------------------------------------------------------------

// With one bit of magnitude, the levels are the means of the smaller and of the larger magnitudes.
// A magnitude belongs to the nearer level (Lloyd, "Least squares quantization in PCM", 1982).
// Magnitudes are added as integers, in units of 2^-39 of the largest one's power of two. So the
// order does not matter, and no sum overflows.
constexpr int kRounds = 2;

COMMHOOK_HOST_DEVICE int32_t exponent_of(int32_t rank) {
  const int32_t exponent = rank >> 23;
  return exponent > 1 ? exponent : 1;
}

// exponent: of the largest rank. The result is less than 2^40 and has at most 24 nonzero bits.
COMMHOOK_HOST_DEVICE int64_t fixed_of(int32_t rank, int32_t exponent) {
  const int64_t significand = (rank & 0x7fffff) | (rank >> 23 != 0 ? 0x800000 : 0);
  const int32_t shift = exponent - exponent_of(rank);
  return significand << 16 >> (shift < 63 ? shift : 63);
}

// The first threshold of the search: magnitudes above it count as large.
COMMHOOK_HOST_DEVICE int64_t first_split(int64_t least, int64_t largest) {
  return least + ((largest - least) >> 3) * 3;
}

struct Sums {
  int64_t all;
  int64_t large;
  int32_t count;
  int32_t large_count;
};

struct Means {
  float low;
  float high;
};

// In units of the sums.
COMMHOOK_HOST_DEVICE Means means_of(const Sums& sums) {
  const int32_t small_count = sums.count - sums.large_count;
  if (small_count == 0 || sums.large_count == 0) {
    const float mean = static_cast<float>(sums.all) / static_cast<float>(sums.count);
    return {mean, mean};
  }
  return {static_cast<float>(sums.all - sums.large) / static_cast<float>(small_count),
          static_cast<float>(sums.large) / static_cast<float>(sums.large_count)};
}

COMMHOOK_HOST_DEVICE int64_t next_split(const Means& means) {
  return static_cast<int64_t>((means.low + means.high) * 0.5f);
}

COMMHOOK_HOST_DEVICE uint32_t mean_levels(const Means& means, int32_t exponent) {
  const float unit = float_of(static_cast<uint32_t>(exponent) << 23);  // 2^39 units
  const float low = means.low * 0x1p-39f * unit;
  const float high = means.high * 0x1p-39f * unit;
  return levels_word(codecs::nearest(low), codecs::nearest(high));
}

}  // namespace commhook::chunk_topk
