// Plays the CUDA kernels of topk on the host, thread by thread. A library for test_cuda_topk.py.
#include <algorithm>
#include <vector>

#include "topk_select.h"

using namespace commhook;
using namespace commhook::cuda;

// p: [numel]; indices, values: [count]. values_of_part: that a block of threads takes.
extern "C" void select_entries(const float* p, int64_t numel, int64_t count, int64_t values_of_part,
                               int32_t* indices, float* values) {
  RankState state{static_cast<int32_t>(count), static_cast<int32_t>(count)};
  for (int level = 0; level < kRankLevels; ++level) {
    std::vector<int32_t> counts(kRankBins);
    for (int64_t i = 0; i < numel; ++i) {
      const int bin = bin_of(topk::rank_of(p[i]), level, state);
      if (bin >= 0) {
        ++counts[bin];
      }
    }
    int32_t wanted = state.wanted;
    int bin = kRankBins - 1;
    while (counts[bin] < wanted) {
      wanted -= counts[bin--];
    }
    state = with_bin(state, level, bin, wanted);
  }
  RankCounts before{0, 0};
  for (int64_t begin = 0; begin < numel; begin += values_of_part) {
    const auto part = part_of_message(before, {0, INT32_MAX}, state.wanted);
    RankCounts done{0, 0};
    for (int64_t i = begin; i < std::min(numel, begin + values_of_part); ++i) {
      const int32_t rank = topk::rank_of(p[i]);
      const int32_t entry = entry_of(rank, state.prefix, done, part);
      if (entry >= 0) {
        indices[entry] = static_cast<int32_t>(i);
        values[entry] = topk::sent(p[i]);
      }
      done.above += rank > state.prefix ? 1 : 0;
      done.equal += rank == state.prefix ? 1 : 0;
    }
    before.above += done.above;
    before.equal += done.equal;
  }
}
