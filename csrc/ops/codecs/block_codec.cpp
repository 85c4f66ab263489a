#include "ops/codecs/block_codec.h"

#include "ops/bucket/bucket.h"
#include "ops/codecs/codec_checks.h"

namespace commhook::codecs {

void check_block_size(const char* op, int64_t block_size, int64_t multiple) {
  TORCH_CHECK_VALUE(
      block_size >= multiple && block_size <= kMaxBlockSize && block_size % multiple == 0, op,
      ": block_size must be a multiple of ", multiple, " of at most ", kMaxBlockSize, ", got ",
      block_size);
}

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
