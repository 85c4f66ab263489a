// The layout of block codecs' messages, for host and device.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

namespace commhook::codecs {

constexpr int64_t kMaxBlockSize = 4096;

// A message's shards, their codes and their parameters begin at multiples of this many bytes, so
// that loads and stores of 16 bytes are aligned. Larger multiples are no faster on the CPU.
constexpr int64_t kShardAlignment = 16;

COMMHOOK_HOST_DEVICE constexpr int64_t filled_up(int64_t bytes) {
  return (bytes + kShardAlignment - 1) / kShardAlignment * kShardAlignment;
}

struct BlockForm {
  int64_t block_size;  // a block's codes fill a multiple of 4 bytes
  int64_t bits;        // of a value: 1, 2, 4 or 8
  int64_t parameters;  // of a block

  COMMHOOK_HOST_DEVICE int64_t code_bytes(int64_t count) const { return (count * bits + 7) / 8; }
};

// A message consists of shards, each of whole blocks, about equally many. A shard consists of the
// codes of its blocks, then the blocks' parameters; zeros pad each to a multiple of kShardAlignment
// bytes. The last block of all may be shorter than the others; it is in the last shard. A shard
// without blocks has no bytes.
class BlockLayout {
 public:
  COMMHOOK_HOST_DEVICE BlockLayout(const BlockForm& form, int64_t numel, int64_t shards)
      : form_(form),
        numel_(numel),
        shards_(shards),
        blocks_((numel + form.block_size - 1) / form.block_size),
        least_(blocks_ / shards),
        bytes_of_least_(bytes_of(least_ * form.block_size, least_)),
        bytes_of_most_(bytes_of((least_ + 1) * form.block_size, least_ + 1)) {}

  COMMHOOK_HOST_DEVICE const BlockForm& form() const { return form_; }
  COMMHOOK_HOST_DEVICE int64_t numel() const { return numel_; }
  COMMHOOK_HOST_DEVICE int64_t shards() const { return shards_; }
  COMMHOOK_HOST_DEVICE int64_t blocks() const { return blocks_; }

  COMMHOOK_HOST_DEVICE int64_t bytes() const {
    return offset_of_shard(shards_ - 1) + bytes_of_shard(shards_ - 1);
  }

  COMMHOOK_HOST_DEVICE int64_t shard_of_block(int64_t block) const {
    // The last shard that begins at this block or before.
    return ((block + 1) * shards_ - 1) / blocks_;
  }

  COMMHOOK_HOST_DEVICE int64_t first_block(int64_t shard) const {
    return blocks_ * shard / shards_;
  }

  COMMHOOK_HOST_DEVICE int64_t first_element(int64_t shard) const {
    const int64_t first = first_block(shard) * form_.block_size;
    return first < numel_ ? first : numel_;
  }

  // `shard` is at most the last one: the end of the last one has no offset. The shards before it
  // hold whole blocks; `longer` of them have one block more than the others.
  COMMHOOK_HOST_DEVICE int64_t offset_of_shard(int64_t shard) const {
    const int64_t longer = first_block(shard) - shard * least_;
    return (shard - longer) * bytes_of_least_ + longer * bytes_of_most_;
  }

  COMMHOOK_HOST_DEVICE int64_t bytes_of_shard(int64_t shard) const {
    return bytes_of(elements_of(shard), first_block(shard + 1) - first_block(shard));
  }

  // Counted from the beginning of the shard.
  COMMHOOK_HOST_DEVICE int64_t offset_of_parameters(int64_t shard) const {
    return filled_up(form_.code_bytes(elements_of(shard)));
  }

  // The bytes [begin, end) of the message's padding.
  struct Fill {
    int64_t begin;
    int64_t end;
  };
  COMMHOOK_HOST_DEVICE Fill fill_of_codes(int64_t shard) const {
    const int64_t offset = offset_of_shard(shard);
    return {offset + form_.code_bytes(elements_of(shard)), offset + offset_of_parameters(shard)};
  }
  COMMHOOK_HOST_DEVICE Fill fill_of_parameters(int64_t shard) const {
    const int64_t offset = offset_of_shard(shard);
    const int64_t described = bytes_of_parameters(first_block(shard + 1) - first_block(shard));
    return {offset + offset_of_parameters(shard) + described, offset + bytes_of_shard(shard)};
  }

 private:
  COMMHOOK_HOST_DEVICE int64_t elements_of(int64_t shard) const {
    return first_element(shard + 1) - first_element(shard);
  }
  COMMHOOK_HOST_DEVICE int64_t bytes_of_parameters(int64_t blocks) const {
    return blocks * form_.parameters * static_cast<int64_t>(sizeof(float));
  }
  // The bytes of a shard.
  COMMHOOK_HOST_DEVICE int64_t bytes_of(int64_t elements, int64_t blocks) const {
    return filled_up(filled_up(form_.code_bytes(elements)) + bytes_of_parameters(blocks));
  }

  BlockForm form_;
  int64_t numel_;
  int64_t shards_;
  int64_t blocks_;
  int64_t least_;  // a shard's blocks; some shards have one more
  int64_t bytes_of_least_;
  int64_t bytes_of_most_;
};

}  // namespace commhook::codecs
