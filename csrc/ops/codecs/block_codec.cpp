#include "ops/codecs/block_codec.h"

#include "ops/autograd_checks.h"
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

constexpr int64_t kMostShards = 1 << 20;

void check_shards(const char* op, int64_t shards) {
  TORCH_CHECK_VALUE(shards >= 1 && shards <= kMostShards, op,
                    ": shards must be at least 1 and at most 2^20, got ", shards);
}

Chunks chunks_of(const char* op, const BlockForm& form, int64_t numel, int64_t shards,
                 at::OptionalIntArrayRef sizes) {
  if (!sizes.has_value()) {
    return {form, numel, shards};
  }
  TORCH_CHECK_VALUE(shards == 1, op, ": shards must be 1 if sizes are given, got ", shards);
  const auto count = static_cast<int64_t>(sizes->size());
  TORCH_CHECK_VALUE(count >= 1 && count <= kMostShards, op,
                    ": sizes must be at least 1 number and at most 2^20, got ", count);
  int64_t left = numel;
  for (const int64_t size : *sizes) {
    TORCH_CHECK_VALUE(size >= 0, op, ": sizes must be at least 0, got ", *sizes);
    TORCH_CHECK_VALUE(size <= left, op, ": sizes must add up to ", numel, " elements, got ",
                      *sizes);
    left -= size;
  }
  TORCH_CHECK_VALUE(left == 0, op, ": sizes must add up to ", numel, " elements, got ", *sizes);
  return {form, *sizes};
}

void check_messages(const char* op, const at::Tensor& messages, const BlockLayout& layout) {
  TORCH_CHECK_VALUE(messages.dim() == 2 && messages.size(0) >= 1, op,
                    ": messages must have two dimensions, one row for each message, got sizes ",
                    messages.sizes());
  // With rows of no bytes there may be so many that the product would overflow.
  TORCH_CHECK_VALUE(messages.size(1) > 0 || layout.bytes() == 0, op, ": messages must hold ",
                    layout.bytes(), " bytes in each row, got sizes ", messages.sizes());
  check_message(op, "messages", messages, messages.size(0) * layout.bytes());
}

void check_numel(const char* op, int64_t numel) {
  // Beyond this, the bytes of a message may not fit in an int64.
  constexpr int64_t kMost = int64_t{1} << 60;
  TORCH_CHECK_VALUE(numel >= 0 && numel <= kMost, op,
                    ": numel must be at least 0 and at most 2^60, got ", numel);
}

}  // namespace

Chunks check_encode(const char* op, at::TensorList tensors, const at::Tensor& message,
                    const BlockForm& form, int64_t shards, at::OptionalIntArrayRef sizes,
                    const std::optional<at::Tensor>& error,
                    const std::optional<at::Tensor>& rounding) {
  check_shards(op, shards);
  check_flatten(op, tensors, at::kFloat);
  const auto device = tensors[0].device();
  const int64_t numel = total_numel(tensors);
  auto chunks = chunks_of(op, form, numel, shards, sizes);
  check_message(op, "message", message, chunks.bytes());
  check_device(op, "message", message, device);
  check_error(op, error, numel, device);
  check_rounding(op, rounding, device);
  check_encoded_apart(op, tensors, message, error);
  return chunks;
}

Chunks check_decode(const char* op, const at::Tensor& message, at::TensorList tensors,
                    const BlockForm& form, int64_t shards, at::OptionalIntArrayRef sizes) {
  check_shards(op, shards);
  check_flatten(op, tensors, at::kFloat);
  auto chunks = chunks_of(op, form, total_numel(tensors), shards, sizes);
  check_message(op, "message", message, chunks.bytes());
  check_device(op, "message", message, tensors[0].device());
  check_destinations(op, message, "message", tensors);
  return chunks;
}

BlockLayout check_decode_sum(const char* op, const at::Tensor& messages, at::TensorList tensors,
                             const BlockForm& form) {
  check_flatten(op, tensors, at::kFloat);
  const BlockLayout layout(form, total_numel(tensors), 1);
  check_messages(op, messages, layout);
  check_device(op, "messages", messages, tensors[0].device());
  check_destinations(op, messages, "messages", tensors);
  return layout;
}

BlockLayout check_reduce(const char* op, const at::Tensor& messages, const at::Tensor& message,
                         const BlockForm& form, int64_t numel,
                         const std::optional<at::Tensor>& error,
                         const std::optional<at::Tensor>& rounding) {
  check_numel(op, numel);
  const BlockLayout layout(form, numel, 1);
  check_messages(op, messages, layout);
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

BlockLayout check_reduce_shards(const char* op, at::TensorList messages, const at::Tensor& message,
                                const BlockForm& form, int64_t numel,
                                const std::optional<at::Tensor>& error,
                                const std::optional<at::Tensor>& rounding,
                                const std::optional<at::Tensor>& failed) {
  check_numel(op, numel);
  symmetric::check_ranks(op, "messages", static_cast<int64_t>(messages.size()), 1);
  const BlockLayout layout(form, numel, 1);
  check_message(op, "message", message, layout.bytes());
  const auto device = message.device();
  check_error(op, error, numel, device);
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const auto name = argument_name("messages", index);
    check_message(op, name.c_str(), messages[i], layout.bytes());
    check_device(op, name.c_str(), messages[i], device);
    check_apart(op, "message", message, "messages", index, messages[i]);
    if (is_there(error)) {
      check_apart(op, "error", *error, "messages", index, messages[i]);
    }
  }
  check_rounding(op, rounding, device);
  symmetric::check_failed(op, failed, device);
  if (is_there(error)) {
    check_apart(op, "message", message, "error", -1, *error);
  }
  return layout;
}

}  // namespace commhook::codecs
