#include "ops/codecs/codec_checks.h"

#include "ops/memory_check.h"
#include "ops/memory_overlap.h"
#include "ops/type_names.h"

namespace commhook::codecs {

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
  const auto remainder = reinterpret_cast<std::uintptr_t>(message.const_data_ptr()) % sizeof(float);
  TORCH_CHECK_VALUE(remainder == 0, op, ": ", argument,
                    " must begin at an address that is a multiple of 4, got a remainder of ",
                    remainder);
}

void check_error(const char* op, const std::optional<at::Tensor>& error, int64_t numel,
                 at::Device device) {
  if (!is_there(error)) {
    return;
  }
  TORCH_CHECK_TYPE(error->layout() == at::kStrided, op,
                   ": error must be dense (torch.strided), got layout ",
                   layout_name(error->layout()));
  TORCH_CHECK_TYPE(error->scalar_type() == at::kFloat || error->scalar_type() == at::kBFloat16, op,
                   ": error must be of dtype float32 or bfloat16, got ",
                   dtype_name(error->scalar_type()));
  TORCH_CHECK_VALUE(error->device() == device, op, ": error must be on the device of the values, ",
                    device, ", got ", error->device());
  TORCH_CHECK_VALUE(error->is_contiguous() && error->numel() == numel, op,
                    ": error must be contiguous and hold ", numel, " elements, got sizes ",
                    error->sizes(), " with strides ", error->strides());
  check_memory(op, "error", -1, *error);
}

void check_rounding(const char* op, const std::optional<at::Tensor>& rounding, at::Device device) {
  if (!is_there(rounding)) {
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

void check_encoded_apart(const char* op, at::TensorList tensors, const at::Tensor& message,
                         const std::optional<at::Tensor>& error) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    check_apart(op, "message", message, "tensors", index, tensors[i]);
    if (is_there(error)) {
      check_apart(op, "error", *error, "tensors", index, tensors[i]);
    }
  }
  if (is_there(error)) {
    check_apart(op, "message", message, "error", -1, *error);
  }
}

Rounding rounding_of(const std::optional<at::Tensor>& rounding) {
  if (!is_there(rounding)) {
    return {false, 0, 0, 0};
  }
  const auto* const values = rounding->const_data_ptr<int64_t>();
  const auto seed = static_cast<uint64_t>(values[0]);
  return {true, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
          static_cast<uint32_t>(values[1])};
}

}  // namespace commhook::codecs
