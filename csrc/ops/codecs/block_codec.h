// Codecs that send values in blocks, a few bits for each value and a few float32 parameters for
// each block: the form of their messages, and the checks of their operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/codecs/codec_checks.h"

namespace commhook::codecs {

constexpr int64_t kMaxBlockSize = 4096;

struct BlockForm {
  int64_t block_size;  // with which a block's codes are a multiple of 4 bytes
  int64_t bits;        // of a value: 1, 2, 4 or 8
  int64_t parameters;  // of a block

  int64_t code_bytes(int64_t count) const { return (count * bits + 7) / 8; }
};

// block_size: a multiple of `multiple`, of at most kMaxBlockSize.
void check_block_size(const char* op, int64_t block_size, int64_t multiple);

// Where a message has what. It consists of shards, each of whole blocks, about equally many:
//   the codes of the shard's blocks, filled up to a multiple of 4 bytes; the blocks' parameters.
// The last block of all may be shorter than the others.
class BlockLayout {
 public:
  BlockLayout(const BlockForm& form, int64_t numel, int64_t shards);

  const BlockForm& form() const { return form_; }
  int64_t numel() const { return numel_; }
  int64_t shards() const { return shards_; }
  int64_t blocks() const { return blocks_; }
  int64_t bytes() const;

  int64_t shard_of_block(int64_t block) const;
  int64_t first_block(int64_t shard) const { return blocks_ * shard / shards_; }
  int64_t first_element(int64_t shard) const;
  int64_t offset_of_shard(int64_t shard) const;
  // From the beginning of the shard.
  int64_t offset_of_parameters(int64_t shard) const;
  // The bytes [begin, end) of the message that hold nothing.
  struct Fill {
    int64_t begin;
    int64_t end;
  };
  Fill fill() const;

 private:
  int64_t bytes_of_block() const;  // of a whole one, with its parameters

  const BlockForm form_;
  const int64_t numel_;
  const int64_t shards_;
  const int64_t blocks_;
};

// Each throws an error that names the operator, the argument, its contract and the value.

// tensors: as flatten takes them. message: contiguous bytes, as many as the layout has. error: flat
// float32, as many as the tensors have; none is taken as well. rounding: two int64, seed and step;
// none is to the nearest. All on one device, with no memory shared.
BlockLayout check_encode(const char* op, at::TensorList tensors, const at::Tensor& message,
                         const BlockForm& form, int64_t shards,
                         const std::optional<at::Tensor>& error,
                         const std::optional<at::Tensor>& rounding);
// tensors: as unflatten_into takes them.
BlockLayout check_decode(const char* op, const at::Tensor& message, at::TensorList tensors,
                         const BlockForm& form, int64_t shards);
// messages: [messages, bytes of one of `numel` values in one shard]. message: one such.
BlockLayout check_reduce(const char* op, const at::Tensor& messages, const at::Tensor& message,
                         const BlockForm& form, int64_t numel,
                         const std::optional<at::Tensor>& error,
                         const std::optional<at::Tensor>& rounding);

}  // namespace commhook::codecs
