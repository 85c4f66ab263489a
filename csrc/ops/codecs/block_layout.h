// The form of the messages of block codecs, for host and device.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

namespace commhook::codecs {

constexpr int64_t kMaxBlockSize = 4096;

struct BlockForm {
  int64_t block_size;  // with which a block's codes are a multiple of 4 bytes
  int64_t bits;        // of a value: 1, 2, 4 or 8
  int64_t parameters;  // of a block

  COMMHOOK_HOST_DEVICE int64_t code_bytes(int64_t count) const { return (count * bits + 7) / 8; }
};

// Where a message has what. It consists of shards, each of whole blocks, about equally many:
//   the codes of the shard's blocks, filled up to a multiple of 4 bytes; the blocks' parameters.
// The last block of all may be shorter than the others.
class BlockLayout {
 public:
  COMMHOOK_HOST_DEVICE BlockLayout(const BlockForm& form, int64_t numel, int64_t shards)
      : form_(form),
        numel_(numel),
        shards_(shards),
        blocks_((numel + form.block_size - 1) / form.block_size) {}

  COMMHOOK_HOST_DEVICE const BlockForm& form() const { return form_; }
  COMMHOOK_HOST_DEVICE int64_t numel() const { return numel_; }
  COMMHOOK_HOST_DEVICE int64_t shards() const { return shards_; }
  COMMHOOK_HOST_DEVICE int64_t blocks() const { return blocks_; }

  COMMHOOK_HOST_DEVICE int64_t bytes() const {
    const int64_t whole = numel_ / form_.block_size;
    const int64_t rest = numel_ - whole * form_.block_size;
    int64_t bytes = whole * bytes_of_block();
    if (rest > 0) {
      bytes += filled_up(form_.code_bytes(rest)) + bytes_of_parameters();
    }
    return bytes;
  }

  COMMHOOK_HOST_DEVICE int64_t shard_of_block(int64_t block) const {
    return ((block + 1) * shards_ - 1) / blocks_;  // the last one that begins with it or before
  }

  COMMHOOK_HOST_DEVICE int64_t first_block(int64_t shard) const {
    return blocks_ * shard / shards_;
  }

  COMMHOOK_HOST_DEVICE int64_t first_element(int64_t shard) const {
    const int64_t first = first_block(shard) * form_.block_size;
    return first < numel_ ? first : numel_;
  }

  COMMHOOK_HOST_DEVICE int64_t offset_of_shard(int64_t shard) const {
    const int64_t before = first_block(shard);
    return before == blocks_ ? bytes() : before * bytes_of_block();
  }

  // From the beginning of the shard.
  COMMHOOK_HOST_DEVICE int64_t offset_of_parameters(int64_t shard) const {
    return filled_up(form_.code_bytes(first_element(shard + 1) - first_element(shard)));
  }

  // The bytes [begin, end) of the message that hold nothing.
  struct Fill {
    int64_t begin;
    int64_t end;
  };
  COMMHOOK_HOST_DEVICE Fill fill() const {
    if (blocks_ == 0) {
      return {0, 0};
    }
    const int64_t shard = shard_of_block(blocks_ - 1);
    const int64_t offset = offset_of_shard(shard);
    return {offset + form_.code_bytes(numel_ - first_element(shard)),
            offset + offset_of_parameters(shard)};
  }

 private:
  COMMHOOK_HOST_DEVICE static int64_t filled_up(int64_t bytes) { return (bytes + 3) / 4 * 4; }
  COMMHOOK_HOST_DEVICE int64_t bytes_of_parameters() const {
    return form_.parameters * static_cast<int64_t>(sizeof(float));
  }
  COMMHOOK_HOST_DEVICE int64_t bytes_of_block() const {  // of a whole one, with its parameters
    return form_.code_bytes(form_.block_size) + bytes_of_parameters();
  }

  BlockForm form_;
  int64_t numel_;
  int64_t shards_;
  int64_t blocks_;
};

}  // namespace commhook::codecs
