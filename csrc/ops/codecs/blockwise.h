// Block quantisation: the form of a message, and what its kernels take.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace commhook::blockwise {

constexpr int64_t kMaxBlockSize = 4096;

// How values are quantised; see blockwise_math.h.
struct Format {
  int64_t bits;
  int64_t block_size;
  bool is_symmetric;

  int64_t parameters() const { return is_symmetric ? 1 : 2; }  // of a block, in float32
  int64_t code_bytes(int64_t count) const { return bits == 8 ? count : (count + 1) / 2; }
};

// Where a message has what. It consists of shards, each of whole blocks, about equally many:
//   the codes of the shard's blocks, filled up to a multiple of 4 bytes; the blocks' parameters.
// The last block of all may be shorter than the others.
class Layout {
 public:
  Layout(const Format& format, int64_t numel, int64_t shards);

  const Format& format() const { return format_; }
  int64_t blocks() const { return blocks_; }
  int64_t bytes() const { return offset_of_shard(shards_); }

  int64_t shard_of_block(int64_t block) const;
  int64_t first_block(int64_t shard) const { return blocks_ * shard / shards_; }
  int64_t first_element(int64_t shard) const;
  int64_t offset_of_shard(int64_t shard) const;
  // From the beginning of the shard.
  int64_t offset_of_parameters(int64_t shard) const;

 private:
  int64_t bytes_of_shard(int64_t shard) const;

  const Format format_;
  const int64_t numel_;
  const int64_t shards_;
  const int64_t blocks_;
};

// Stochastic where there is a seed.
struct Rounding {
  bool is_stochastic;
  uint32_t seed0;
  uint32_t seed1;
  uint32_t step;
};

struct Encoding {
  float scale;
  Rounding rounding;
};

}  // namespace commhook::blockwise
