// The kernels of topk for one instruction set: see cpu/for_each_instruction_set.h. Plain loops over
// at most kPiece values, which compilers vectorise.
#include "ops/codecs/block_codec_kernels.inl"

// error = value * scale + error, in place. A compiler would not vectorise compensated(), since its
// source and destination might overlap.
void compensate(const float* __restrict values, int64_t n, float scale, float* __restrict error) {
  for (int64_t i = 0; i < n; ++i) {
    error[i] = values[i] * scale + error[i];
  }
}

const float* scaled(const float* values, int64_t n, float scale, const float* error,
                    float* buffer) {
  return compensated(values, n, scale, error, buffer);
}

int64_t collect(const float* __restrict p, int64_t n, int64_t position, int32_t least,
                int64_t* ties, int32_t* __restrict indices, float* __restrict values) {
  alignas(64) uint8_t is_candidate[kPiece + 8];
  const int32_t from = *ties > 0 ? least : least + 1;
  for (int64_t i = 0; i < n; ++i) {
    is_candidate[i] = rank_of(p[i]) >= from ? 1 : 0;
  }
  __builtin_memset(is_candidate + n, 0, 8);
  int64_t count = 0;
  int64_t left = *ties;
  for (int64_t i = 0; i < n; i += 8) {
    // A byte for each of eight values, the first in the lowest byte; nearly always 0.
    uint64_t flags;
    __builtin_memcpy(&flags, is_candidate + i, sizeof(flags));
    for (; flags != 0; flags &= flags - 1) {
      const int64_t j = i + __builtin_ctzll(flags) / 8;
      const bool is_tie = rank_of(p[j]) == least;
      if (is_tie && left == 0) {
        continue;
      }
      left -= is_tie ? 1 : 0;
      indices[count] = static_cast<int32_t>(position + j);
      values[count] = p[j];
      ++count;
    }
  }
  *ties = left;
  return count;
}

void count_high(const float* p, int64_t n, uint32_t* counts) {
  for (int64_t i = 0; i < n; ++i) {
    ++counts[rank_of(p[i]) >> kLowBits];
  }
}

void count_low(const float* p, int64_t n, int32_t high, uint32_t* counts) {
  for (int64_t i = 0; i < n; ++i) {
    const int32_t rank = rank_of(p[i]);
    if (rank >> kLowBits == high) {
      ++counts[rank & kLowMask];
    }
  }
}

void count_above(const float* p, int64_t n, int32_t rank, int64_t* above, int64_t* equal) {
  int32_t counts[2] = {0, 0};
  for (int64_t i = 0; i < n; ++i) {
    const int32_t own = rank_of(p[i]);
    counts[0] += own > rank ? 1 : 0;
    counts[1] += own == rank ? 1 : 0;
  }
  *above += counts[0];
  *equal += counts[1];
}

void drop_nonfinite(float* error, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    error[i] = (bits_of(error[i]) & kAbsolute) >= kInfinity ? 0.0f : error[i];
  }
}

constexpr Kernels kKernels{compensate, scaled,      collect,       count_high,
                           count_low,  count_above, drop_nonfinite};
