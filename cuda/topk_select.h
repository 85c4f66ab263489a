// The choice of the values that topk sends: the search for their least rank, and the place of each
// in the message. For host and device.
#pragma once

#include <cstdint>

#include "ops/codecs/topk_math.h"
#include "partition.h"
#include "quad.h"

namespace commhook::cuda {

// A rank has 31 bits. The first pass counts the values by the upper 12. The second pass takes the
// values with the upper bits of the least rank that is sent, and counts them by the lower 19. It
// does so twice, by the upper 10 of these and by all 19, so that the search reads few counts.
constexpr int kLowBits = 19;
constexpr int kFineBits = 9;
constexpr int32_t kLowMask = (1 << kLowBits) - 1;
constexpr int kHighBins = 1 << (31 - kLowBits);
constexpr int kMiddleBins = 1 << (kLowBits - kFineBits);
constexpr int kFineBins = 1 << kFineBits;
constexpr int kLowBins = kMiddleBins * kFineBins;

// The known bits of the least rank that is sent: the upper bits or all. And the number of values
// with these bits that are sent.
struct RankState {
  int32_t prefix;
  int32_t wanted;
};

// Later passes skip groups if their largest rank is too small. They read the upper bits of each
// group's largest rank.
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

// The number of a part's values above a rank, and of that rank.
struct RankCounts {
  int32_t above;
  int32_t equal;
};

// The state of a part, in one word for a single store: which counts are known, and counts below
// 2^31.
// The last: of the part and those before it.
enum class Known : uint64_t { kNothing, kOwn, kAllBefore };

COMMHOOK_HOST_DEVICE uint64_t part_state(Known known, const RankCounts& counts) {
  return static_cast<uint64_t>(known) << 62 | static_cast<uint64_t>(counts.above) << 31 |
         static_cast<uint64_t>(counts.equal);
}

COMMHOOK_HOST_DEVICE Known known_of(uint64_t state) { return static_cast<Known>(state >> 62); }

// Only the counts. They may be added over parts, since the sums are below 2^31, too.
COMMHOOK_HOST_DEVICE uint64_t counts_word(uint64_t state) { return state & ((1ull << 62) - 1); }

COMMHOOK_HOST_DEVICE RankCounts counts_in(uint64_t state) {
  constexpr uint64_t kMask = (1ull << 31) - 1;
  return {static_cast<int32_t>(state >> 31 & kMask), static_cast<int32_t>(state & kMask)};
}

// The sent values of a part: all above the rank, and the first `ties` of it, from `offset` on.
struct PartOfMessage {
  int32_t offset;
  int32_t ties;
};

// before: the counts of the parts before it. ties: the number sent in all parts.
COMMHOOK_HOST_DEVICE PartOfMessage part_of_message(const RankCounts& before, int32_t ties) {
  const int32_t taken = before.equal < ties ? before.equal : ties;
  return {before.above + taken, ties - taken};
}

// The entry of a value, -1 if it is not sent. before: the counts before it in its part.
COMMHOOK_HOST_DEVICE int32_t entry_of(int32_t rank, int32_t least, const RankCounts& before,
                                      const PartOfMessage& part) {
  if (rank < least || (rank == least && before.equal >= part.ties)) {
    return -1;
  }
  return part.offset + before.above + (before.equal < part.ties ? before.equal : part.ties);
}

}  // namespace commhook::cuda
