#include "ops/codecs/block_codec.h"

#include <algorithm>

#include "ops/bucket.h"
#include "ops/codecs/codec_checks.h"

namespace commhook::codecs {

// ---- the form of a message ---------------------------------------------------------------------

void check_block_size(const char* op, int64_t block_size, int64_t multiple) {
  TORCH_CHECK_VALUE(
      block_size >= multiple && block_size <= kMaxBlockSize && block_size % multiple == 0, op,
      ": block_size must be a multiple of ", multiple, " of at most ", kMaxBlockSize, ", got ",
      block_size);
}

BlockLayout::BlockLayout(const BlockForm& form, int64_t numel, int64_t shards)
    : form_(form),
      numel_(numel),
      shards_(shards),
      blocks_((numel + form.block_size - 1) / form.block_size) {}

int64_t BlockLayout::bytes_of_block() const {
  return form_.code_bytes(form_.block_size) +
         form_.parameters * static_cast<int64_t>(sizeof(float));
}

int64_t BlockLayout::bytes() const {
  const int64_t whole = numel_ / form_.block_size;
  const int64_t rest = numel_ - whole * form_.block_size;
  int64_t bytes = whole * bytes_of_block();
  if (rest > 0) {
    bytes += (form_.code_bytes(rest) + 3) / 4 * 4 +
             form_.parameters * static_cast<int64_t>(sizeof(float));
  }
  return bytes;
}

int64_t BlockLayout::shard_of_block(int64_t block) const {
  return ((block + 1) * shards_ - 1) / blocks_;  // the last one that begins with it or before
}

int64_t BlockLayout::first_element(int64_t shard) const {
  return std::min(numel_, first_block(shard) * form_.block_size);
}

int64_t BlockLayout::offset_of_shard(int64_t shard) const {
  const int64_t before = first_block(shard);
  return before == blocks_ ? bytes() : before * bytes_of_block();
}

int64_t BlockLayout::offset_of_parameters(int64_t shard) const {
  const int64_t count = first_element(shard + 1) - first_element(shard);
  return (form_.code_bytes(count) + 3) / 4 * 4;
}

BlockLayout::Fill BlockLayout::fill() const {
  if (blocks_ == 0) {
    return {0, 0};
  }
  const int64_t shard = shard_of_block(blocks_ - 1);
  const int64_t offset = offset_of_shard(shard);
  const int64_t count = numel_ - first_element(shard);
  return {offset + form_.code_bytes(count), offset + offset_of_parameters(shard)};
}

// ---- checks ------------------------------------------------------------------------------------

namespace {

void check_shards(const char* op, int64_t shards) {
  TORCH_CHECK_VALUE(shards >= 1 && shards <= (1 << 20), op,
                    ": shards must be at least 1 and at most 2^20, got ", shards);
}

}  // namespace

BlockLayout check_encode(const char* op, at::TensorList tensors, const at::Tensor& message,
                         const BlockForm& form, int64_t shards,
                         const std::optional<at::Tensor>& error,
                         const std::optional<at::Tensor>& rounding) {
  check_shards(op, shards);
  check_flatten(op, tensors, at::kFloat);
  const auto device = tensors[0].device();
  const int64_t numel = total_numel(tensors);
  const BlockLayout layout(form, numel, shards);
  check_message(op, "message", message, layout.bytes());
  check_device(op, "message", message, device);
  check_error(op, error, numel, device);
  check_rounding(op, rounding, device);
  check_encoded_apart(op, tensors, message, error);
  return layout;
}

BlockLayout check_decode(const char* op, const at::Tensor& message, at::TensorList tensors,
                         const BlockForm& form, int64_t shards) {
  check_shards(op, shards);
  check_flatten(op, tensors, at::kFloat);
  const int64_t numel = total_numel(tensors);
  const BlockLayout layout(form, numel, shards);
  check_message(op, "message", message, layout.bytes());
  check_device(op, "message", message, tensors[0].device());
  check_destinations(op, message, "message", tensors);
  return layout;
}

BlockLayout check_reduce(const char* op, const at::Tensor& messages, const at::Tensor& message,
                         const BlockForm& form, int64_t numel,
                         const std::optional<at::Tensor>& error,
                         const std::optional<at::Tensor>& rounding) {
  TORCH_CHECK_VALUE(numel >= 0, op, ": numel must be at least 0, got ", numel);
  const BlockLayout layout(form, numel, 1);
  TORCH_CHECK_VALUE(messages.dim() == 2 && messages.size(0) >= 1, op,
                    ": messages must have two dimensions, one row for each message, got sizes ",
                    messages.sizes());
  check_message(op, "messages", messages, messages.size(0) * layout.bytes());
  check_message(op, "message", message, layout.bytes());
  check_device(op, "message", message, messages.device());
  check_error(op, error, numel, messages.device());
  check_rounding(op, rounding, messages.device());
  check_apart(op, "message", message, "messages", -1, messages);
  if (is_there(error)) {
    check_apart(op, "message", message, "error", -1, *error);
    check_apart(op, "error", *error, "messages", -1, messages);
  }
  return layout;
}

}  // namespace commhook::codecs
