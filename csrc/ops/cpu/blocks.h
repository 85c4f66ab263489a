// Reads a tensor list as blocks of equally many float32 values, across the borders of its tensors.
// The kernels of codecs read a bucket this way, in one pass.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/cpu/row_kernels.h"
#include "ops/cpu/segments.h"

namespace commhook::cpu {

constexpr int64_t kMaxBlock = 4096;

// Calls blocks(values, position, count) for the elements [begin, end) of the list: some blocks of
// `size`, of which the last of all may be shorter. Float32 values are read in place if a whole
// block is in one tensor. Others are assembled in a piece that stays in the first-level cache.
template <typename Blocks>
void for_each_block(const Segments& segments, int64_t begin, int64_t end, int64_t size,
                    const RowKernels& kernels, const Blocks& blocks) {
  constexpr int kFloat = 1;  // dtype_index(at::kFloat)
  alignas(64) float piece[kMaxBlock];
  alignas(64) char gathered[Segments::kPieceElements * sizeof(double)];
  int64_t filled = 0;

  const auto append = [&](const Segment& segment, const char* data, int64_t position,
                          int64_t count) {
    while (count > 0) {
      const int64_t n = std::min(count, size - filled);
      if (segment.dtype == kFloat) {
        std::memcpy(piece + filled, data, static_cast<size_t>(n) * sizeof(float));
      } else {
        kernels.plain[segment.dtype][kFloat](data, piece + filled, n, 1.0, nullptr);
      }
      filled += n;
      position += n;
      data += n * segment.element_size;
      count -= n;
      if (filled == size || position == end) {
        blocks(piece, position - filled, filled);
        filled = 0;
      }
    }
  };

  segments.walk(
      begin, end,
      [&](const Segment& segment, const char* data, int64_t position, int64_t count) {
        if (segment.dtype == kFloat) {
          if (filled > 0) {
            const int64_t n = std::min(count, size - filled);
            append(segment, data, position, n);
            data += n * static_cast<int64_t>(sizeof(float));
            position += n;
            count -= n;
          }
          const auto pass = [&](int64_t n) {
            if (n > 0) {
              blocks(reinterpret_cast<const float*>(data), position, n);
              data += n * static_cast<int64_t>(sizeof(float));
              position += n;
              count -= n;
            }
          };
          pass(std::max<int64_t>(0, count - kMaxBlock) / size * size);
          if (count > 0) {
            segments.prefetch_after(segment);
          }
          pass(count / size * size);
        }
        append(segment, data, position, count);
      },
      [&](const Segment& segment, int64_t position, int64_t count) {
        gather(segment, position, count, gathered);
        append(segment, gathered, position, count);
      });
}

// The inverse: calls make(values, position, count, in_place), which writes blocks of values. They
// are written in place, or to a buffer that is copied to its place immediately.
template <typename Make>
void write_each_block(const Segments& segments, int64_t begin, int64_t end, int64_t size,
                      const RowKernels& kernels, const Make& make) {
  constexpr int kFloat = 1;  // dtype_index(at::kFloat)
  alignas(64) float piece[kMaxBlock];
  alignas(64) char gathered[Segments::kPieceElements * sizeof(double)];
  int64_t made = 0;
  int64_t taken = 0;

  // Takes at most `count` of the next values; returns how many.
  const auto take = [&](int64_t position, int64_t count, const float** values) {
    if (taken == made) {
      made = std::min(size, end - position);
      taken = 0;
      make(piece, position, made, false);
    }
    const int64_t n = std::min(count, made - taken);
    *values = piece + taken;
    taken += n;
    return n;
  };

  segments.walk(
      begin, end,
      [&](const Segment& segment, char* data, int64_t position, int64_t count) {
        while (count > 0) {
          int64_t n = count / size * size;
          if (segment.dtype == kFloat && taken == made && n > 0) {
            make(reinterpret_cast<float*>(data), position, n, true);
          } else {
            const float* values = nullptr;
            n = take(position, count, &values);
            kernels.plain[kFloat][segment.dtype](values, data, n, 1.0, nullptr);
          }
          data += n * segment.element_size;
          position += n;
          count -= n;
        }
      },
      [&](const Segment& segment, int64_t position, int64_t count) {
        while (count > 0) {
          const float* values = nullptr;
          const int64_t n = take(position, count, &values);
          kernels.plain[kFloat][segment.dtype](values, gathered, n, 1.0, nullptr);
          scatter(segment, position, n, gathered);
          position += n;
          count -= n;
        }
      });
}

}  // namespace commhook::cpu
