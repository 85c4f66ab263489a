// Which values topk sends: the parts in which the least rank of them is found, and where each goes
// in the message. For host and device.
#pragma once

#include <cstdint>

#include "ops/codecs/topk_math.h"
#include "partition.h"
#include "quad.h"

namespace commhook::cuda {

// A rank has 31 bits. The first pass over the values counts how many have each of its upper 12. The
// second counts, of the values with the upper bits of the least rank that is sent, how many have
// each of the lower 19: twice, by the upper 10 of these and by all, so that few counts are
// searched.
constexpr int kLowBits = 19;
constexpr int kFineBits = 9;
constexpr int32_t kLowMask = (1 << kLowBits) - 1;
constexpr int kHighBins = 1 << (31 - kLowBits);
constexpr int kMiddleBins = 1 << (kLowBits - kFineBits);
constexpr int kFineBins = 1 << kFineBits;
constexpr int kLowBins = kMiddleBins * kFineBins;

// What is known of the least rank that is sent: its upper bits, or all, and how many values that
// have these are sent.
struct RankState {
  int32_t prefix;
  int32_t wanted;
};

// Later passes load no group of values whose largest rank is too small. Of that the upper bits are
// kept.
constexpr int kGroupValues = 16;
constexpr int kGroupQuads = kGroupValues / kQuadValues;
constexpr int kGroupShift = 15;

COMMHOOK_HOST_DEVICE uint16_t group_rank(int32_t largest) {
  return static_cast<uint16_t>(largest >> kGroupShift);
}

// Whether one of a group's values may have that rank or more.
COMMHOOK_HOST_DEVICE bool reaches(uint16_t group, int32_t least) {
  return group >= least >> kGroupShift;
}

// How many values of a part of all are above a rank, and of that rank.
struct RankCounts {
  int32_t above;
  int32_t equal;
};

// The state of a part, in a word that one store writes: what is known, and counts below 2^31.
enum class Known : uint64_t { kNothing, kOwn, kAllBefore };  // the last: of it and those before it

COMMHOOK_HOST_DEVICE uint64_t part_state(Known known, const RankCounts& counts) {
  return static_cast<uint64_t>(known) << 62 | static_cast<uint64_t>(counts.above) << 31 |
         static_cast<uint64_t>(counts.equal);
}

COMMHOOK_HOST_DEVICE Known known_of(uint64_t state) { return static_cast<Known>(state >> 62); }

// The counts alone: of several parts they may be added, as the sums are below 2^31, too.
COMMHOOK_HOST_DEVICE uint64_t counts_word(uint64_t state) { return state & ((1ull << 62) - 1); }

COMMHOOK_HOST_DEVICE RankCounts counts_in(uint64_t state) {
  constexpr uint64_t kMask = (1ull << 31) - 1;
  return {static_cast<int32_t>(state >> 31 & kMask), static_cast<int32_t>(state & kMask)};
}

// What of a part is sent: all above, and of the others the first `ties`, from `offset` on.
struct PartOfMessage {
  int32_t offset;
  int32_t ties;
};

// before: of the parts before it. ties: that are sent of all parts.
COMMHOOK_HOST_DEVICE PartOfMessage part_of_message(const RankCounts& before, int32_t ties) {
  const int32_t taken = before.equal < ties ? before.equal : ties;
  return {before.above + taken, ties - taken};
}

// The entry of a value, -1 for one that is not sent. before: those before it in its part.
COMMHOOK_HOST_DEVICE int32_t entry_of(int32_t rank, int32_t least, const RankCounts& before,
                                      const PartOfMessage& part) {
  if (rank < least || (rank == least && before.equal >= part.ties)) {
    return -1;
  }
  return part.offset + before.above + (before.equal < part.ties ? before.equal : part.ties);
}

}  // namespace commhook::cuda
