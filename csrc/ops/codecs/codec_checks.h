// Arguments of all codecs' operators: a message, an error, random numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace commhook::codecs {

inline bool is_there(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Random if there is a seed.
struct Rounding {
  bool is_random;
  uint32_t seed0;
  uint32_t seed1;
  uint32_t step;
};

// Reads it from a tensor on the CPU.
Rounding rounding_of(const std::optional<at::Tensor>& rounding);

// Each throws an error that names the operator, the argument, its contract and the value.

// message: contiguous, of `bytes` bytes.
void check_message(const char* op, const char* argument, const at::Tensor& message, int64_t bytes);
// error: flat float32 or bfloat16 with `numel` elements on the device, or none.
void check_error(const char* op, const std::optional<at::Tensor>& error, int64_t numel,
                 at::Device device);
// rounding: two int64 on the device, seed and step, or none.
void check_rounding(const char* op, const std::optional<at::Tensor>& rounding, at::Device device);
void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                  at::Device device);
// Checks that an argument shares no memory with another: tensor `index` of a list, or with -1 a
// single tensor.
void check_apart(const char* op, const char* name, const at::Tensor& one, const char* other_name,
                 int64_t index, const at::Tensor& other);
// Checks that tensors, message and error share no memory.
void check_encoded_apart(const char* op, at::TensorList tensors, const at::Tensor& message,
                         const std::optional<at::Tensor>& error);

}  // namespace commhook::codecs
