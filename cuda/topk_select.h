// Which values topk sends: how its kernels find the least of them, and where each goes in the
// message. For host and device.
#pragma once

#include <cstdint>

#include "ops/codecs/topk_math.h"
#include "partition.h"

namespace commhook::cuda {

// A rank, of 31 bits, is found in three steps from the top, each of which counts how many values
// have each of its next bits.
constexpr int kRankLevels = 3;
constexpr int kRankBins = 1 << 11;

struct RankBits {
  int shift;
  int count;
};

COMMHOOK_HOST_DEVICE RankBits bits_of_level(int level) {
  return level == 0 ? RankBits{20, 11} : level == 1 ? RankBits{10, 10} : RankBits{0, 10};
}

// What is known of the least rank that is sent: its bits from the top to those of a level, and of
// how many values that begin with these.
struct RankState {
  int32_t prefix;
  int32_t wanted;
};

// The bin of a rank at a level; -1 where it does not begin with what is known.
COMMHOOK_HOST_DEVICE int bin_of(int32_t rank, int level, const RankState& state) {
  const RankBits bits = bits_of_level(level);
  if (level > 0 && rank >> (bits.shift + bits.count) != state.prefix) {
    return -1;
  }
  return rank >> bits.shift & ((1 << bits.count) - 1);
}

COMMHOOK_HOST_DEVICE RankState with_bin(const RankState& state, int level, int bin,
                                        int32_t wanted) {
  return {level == 0 ? bin : state.prefix << bits_of_level(level).count | bin, wanted};
}

// How many values of a part of all are above a rank, and of that rank.
struct RankCounts {
  int32_t above;
  int32_t equal;
};

// What of a part is sent: all above, and of the others the first `ties`, from `offset` on.
struct PartOfMessage {
  int32_t offset;
  int32_t ties;
};

// before: of the parts before it. ties: that are sent of all parts.
COMMHOOK_HOST_DEVICE PartOfMessage part_of_message(const RankCounts& before, const RankCounts& own,
                                                   int32_t ties) {
  const int32_t taken = before.equal < ties ? before.equal : ties;
  const int32_t left = ties - taken;
  return {before.above + taken, own.equal < left ? own.equal : left};
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
