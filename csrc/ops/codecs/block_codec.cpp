#include "ops/codecs/block_codec.h"

#include <algorithm>

#include "ops/bucket.h"
#include "ops/memory_check.h"
#include "ops/memory_overlap.h"
#include "ops/type_names.h"

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

void check_message(const char* op, const char* argument, const at::Tensor& message, int64_t bytes) {
  TORCH_CHECK_TYPE(message.defined(), op, ": ", argument, " must be a tensor, got None");
  TORCH_CHECK_TYPE(message.layout() == at::kStrided, op, ": ", argument,
                   " must be dense (torch.strided), got layout ", layout_name(message.layout()));
  TORCH_CHECK_TYPE(message.scalar_type() == at::kByte, op, ": ", argument,
                   " must be of dtype uint8, got ", dtype_name(message.scalar_type()));
  TORCH_CHECK_VALUE(message.is_contiguous(), op, ": ", argument, " must be contiguous, got sizes ",
                    message.sizes(), " with strides ", message.strides());
  TORCH_CHECK_VALUE(message.numel() == bytes, op, ": ", argument, " must hold ", bytes,
                    " bytes, got ", message.numel());
  check_memory(op, argument, -1, message);
  TORCH_CHECK_VALUE(reinterpret_cast<std::uintptr_t>(message.const_data_ptr()) % sizeof(float) == 0,
                    op, ": ", argument, " must begin at an address that is a multiple of 4");
}

void check_error(const char* op, const std::optional<at::Tensor>& error, int64_t numel,
                 at::Device device) {
  if (!error.has_value() || !error->defined()) {
    return;
  }
  TORCH_CHECK_TYPE(error->layout() == at::kStrided, op,
                   ": error must be dense (torch.strided), got layout ",
                   layout_name(error->layout()));
  TORCH_CHECK_TYPE(error->scalar_type() == at::kFloat, op, ": error must be of dtype float32, got ",
                   dtype_name(error->scalar_type()));
  TORCH_CHECK_VALUE(error->device() == device, op, ": error must be on the device of the values, ",
                    device, ", got ", error->device());
  TORCH_CHECK_VALUE(error->is_contiguous() && error->numel() == numel, op,
                    ": error must be contiguous and hold ", numel, " elements, got sizes ",
                    error->sizes(), " with strides ", error->strides());
  check_memory(op, "error", -1, *error);
}

void check_rounding(const char* op, const std::optional<at::Tensor>& rounding, at::Device device) {
  if (!rounding.has_value() || !rounding->defined()) {
    return;
  }
  TORCH_CHECK_TYPE(rounding->scalar_type() == at::kLong && rounding->layout() == at::kStrided, op,
                   ": rounding must be a dense tensor of dtype int64, got ",
                   dtype_name(rounding->scalar_type()), " of layout ",
                   layout_name(rounding->layout()));
  TORCH_CHECK_VALUE(rounding->numel() == 2 && rounding->is_contiguous(), op,
                    ": rounding must hold two numbers, seed and step, got sizes ",
                    rounding->sizes());
  TORCH_CHECK_VALUE(rounding->device() == device, op,
                    ": rounding must be on the device of the values, ", device, ", got ",
                    rounding->device());
  check_memory(op, "rounding", -1, *rounding);
}

void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                  at::Device device) {
  TORCH_CHECK_VALUE(tensor.device() == device, op, ": ", argument,
                    " must be on the device of the values, ", device, ", got ", tensor.device());
}

void check_apart(const char* op, const char* name, const at::Tensor& one, const char* other_name,
                 int64_t index, const at::Tensor& other) {
  TORCH_CHECK_VALUE(!overlap(extent_of(one, -1), extent_of(other, index)), op, ": ", name,
                    " must share no memory with ", argument_name(other_name, index),
                    ", got one that does");
}

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
  const bool has_error = error.has_value() && error->defined();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    check_apart(op, "message", message, "tensors", index, tensors[i]);
    if (has_error) {
      check_apart(op, "error", *error, "tensors", index, tensors[i]);
    }
  }
  if (has_error) {
    check_apart(op, "message", message, "error", -1, *error);
  }
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
  if (error.has_value() && error->defined()) {
    check_apart(op, "message", message, "error", -1, *error);
    check_apart(op, "error", *error, "messages", -1, messages);
  }
  return layout;
}

Rounding rounding_of(const std::optional<at::Tensor>& rounding) {
  if (!rounding.has_value() || !rounding->defined()) {
    return {false, 0, 0, 0};
  }
  const auto* const values = rounding->const_data_ptr<int64_t>();
  const auto seed = static_cast<uint64_t>(values[0]);
  return {true, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
          static_cast<uint32_t>(values[1])};
}

}  // namespace commhook::codecs
