// A bucket's runs of values, each with a message of its own; the messages are adjacent in memory.
#pragma once

#include <c10/util/OptionalArrayRef.h>

#include <cstdint>
#include <vector>

#include "ops/codecs/block_layout.h"

namespace commhook::codecs {

struct Chunk {
  BlockLayout layout;
  int64_t element;  // the first element, counted in the bucket
  int64_t block;    // the first block, counted over all chunks: it selects the random numbers
  int64_t offset;   // of the message, in bytes

  int64_t end() const { return element + layout.numel(); }
};

// The chunks of a bucket, in order. There is at least one; some may be empty.
class Chunks {
 public:
  // A single message, in shards.
  Chunks(const BlockForm& form, int64_t numel, int64_t shards)
      : chunks_{{{form, numel, shards}, 0, 0, 0}} {}

  // One message, in one shard, for each of `sizes`, which is not empty.
  Chunks(const BlockForm& form, c10::IntArrayRef sizes) {
    chunks_.reserve(sizes.size());
    Chunk next{{form, 0, 1}, 0, 0, 0};
    for (const int64_t size : sizes) {
      next.layout = {form, size, 1};
      chunks_.push_back(next);
      next = {next.layout, next.end(), next.block + next.layout.blocks(),
              next.offset + next.layout.bytes()};
    }
  }

  auto begin() const { return chunks_.begin(); }
  auto end() const { return chunks_.end(); }

  const BlockForm& form() const { return chunks_.front().layout.form(); }
  int64_t blocks() const { return chunks_.back().block + chunks_.back().layout.blocks(); }
  int64_t bytes() const { return chunks_.back().offset + chunks_.back().layout.bytes(); }

 private:
  std::vector<Chunk> chunks_;
};

}  // namespace commhook::codecs
