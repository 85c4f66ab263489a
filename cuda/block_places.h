// Finds the places of a block's codes and parameters in a message without a division of 64 bits:
// the host computes what all shards share.
#pragma once

#include <cstdint>

#include "ops/codecs/block_layout.h"
#include "ops/host_device.h"

namespace commhook::cuda {

// A shard has `blocks` whole blocks or one more; only the last block of the last shard may be
// shorter. A message of several shards consists of the messages of single shards, one after
// another.
struct ShardPlaces {
  // For a shard of `blocks` whole blocks: its bytes, and the bytes before its parameters. Then the
  // difference for a shard of one more block.
  int64_t bytes;
  int64_t parameters;
  int64_t bytes_more;
  int64_t parameters_more;
  int64_t last_bytes;  // bytes of the last shard
  int64_t last_parameters;
  int64_t all_blocks;
  uint32_t blocks;
  uint32_t longer;  // shards with one more block
  uint32_t shards;
  float shards_of_block;  // approximately 1 / (blocks of a shard)
  uint64_t inverse;       // 2^40 / shards, rounded up

  // The number of shards before this one with one more block.
  COMMHOOK_HOST_DEVICE uint32_t longer_before(uint32_t shard) const {
    // Exact: the product is below 2^24, and its error below 2^-40 of it.
    return static_cast<uint32_t>(uint64_t{longer * shard} * inverse >> 40);
  }
  COMMHOOK_HOST_DEVICE uint32_t first_block(uint32_t shard) const {
    return blocks * shard + longer_before(shard);
  }
  COMMHOOK_HOST_DEVICE uint32_t shard_of(uint32_t block) const {
    const auto guess = static_cast<uint32_t>(static_cast<float>(block) * shards_of_block);
    uint32_t shard = guess < shards ? guess : shards - 1;
    while (first_block(shard) > block) {
      --shard;
    }
    while (shard + 1 < shards && first_block(shard + 1) <= block) {
      ++shard;
    }
    return shard;
  }
};

constexpr int64_t kMostShards = 4096;
constexpr int64_t kMostBlocks = INT32_MAX - 4096;

// Whether ShardPlaces can represent a layout.
inline bool has_places(const codecs::BlockLayout& layout) {
  return layout.shards() <= kMostShards && layout.blocks() <= kMostBlocks;
}

inline ShardPlaces places_of(const codecs::BlockLayout& layout) {
  const int64_t size = layout.form().block_size;
  const int64_t shards = layout.shards();
  const int64_t blocks = layout.blocks() / shards;
  const codecs::BlockLayout shorter(layout.form(), blocks * size, 1);
  const codecs::BlockLayout longer(layout.form(), (blocks + 1) * size, 1);
  return {
      shorter.bytes(),
      shorter.offset_of_parameters(0),
      longer.bytes() - shorter.bytes(),
      longer.offset_of_parameters(0) - shorter.offset_of_parameters(0),
      layout.bytes() - layout.offset_of_shard(shards - 1),
      layout.offset_of_parameters(shards - 1),
      layout.blocks(),
      static_cast<uint32_t>(blocks),
      static_cast<uint32_t>(layout.blocks() % shards),
      static_cast<uint32_t>(shards),
      static_cast<float>(shards) / static_cast<float>(layout.blocks()),
      ((uint64_t{1} << 40) + static_cast<uint64_t>(shards) - 1) / static_cast<uint64_t>(shards)};
}

// The shard of a block: its blocks, and its place in the message.
struct ShardOfBlock {
  uint32_t first;
  uint32_t end;  // block
  int64_t offset;
  int64_t parameters;  // byte of the message
  int64_t bytes_end;   // byte of the message
};

COMMHOOK_HOST_DEVICE ShardOfBlock shard_of_block(const ShardPlaces& places, uint32_t block) {
  const uint32_t shard = places.shards == 1 ? 0 : places.shard_of(block);
  const uint32_t longer = places.longer_before(shard);
  const uint32_t first = places.blocks * shard + longer;
  const bool is_last = shard + 1 == places.shards;
  const uint32_t end =
      is_last ? static_cast<uint32_t>(places.all_blocks) : places.first_block(shard + 1);
  const int64_t offset = shard * places.bytes + longer * places.bytes_more;
  const bool is_longer = end - first > places.blocks;
  const int64_t parameters =
      is_longer ? places.parameters + places.parameters_more : places.parameters;
  const int64_t bytes = is_longer ? places.bytes + places.bytes_more : places.bytes;
  return {first, end, offset, offset + (is_last ? places.last_parameters : parameters),
          offset + (is_last ? places.last_bytes : bytes)};
}

// A block's place, and the end of the shard up to which places of blocks follow each other.
struct PlaceInShard {
  int64_t codes;  // bytes of the message
  int64_t parameters;
  uint32_t end;  // block
};

COMMHOOK_HOST_DEVICE PlaceInShard place_in_shard(const ShardPlaces& places, uint32_t block,
                                                 int code_bytes, int parameter_bytes) {
  const auto shard = shard_of_block(places, block);
  const auto before = static_cast<int64_t>(block - shard.first);
  return {shard.offset + before * code_bytes, shard.parameters + before * parameter_bytes,
          shard.end};
}

}  // namespace commhook::cuda
