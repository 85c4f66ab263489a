// What all codecs' operators take: a message, an error, random numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace commhook::codecs {

inline bool is_there(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Random where there is a seed.
struct Rounding {
  bool is_random;
  uint32_t seed0;
  uint32_t seed1;
  uint32_t step;
};

// What it says, for a tensor on the CPU.
Rounding rounding_of(const std::optional<at::Tensor>& rounding);

// Each throws an error that names the operator, the argument, its contract and the value.

// message: contiguous bytes, so many.
void check_message(const char* op, const char* argument, const at::Tensor& message, int64_t bytes);
// error: flat float32 or bfloat16, so many elements on the device; none is taken as well.
void check_error(const char* op, const std::optional<at::Tensor>& error, int64_t numel,
                 at::Device device);
// rounding: two int64 on the device, seed and step; none is taken as well.
void check_rounding(const char* op, const std::optional<at::Tensor>& rounding, at::Device device);
void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                  at::Device device);
// One argument shares no memory with another, the tensor `index` of a list or, with -1, one alone.
void check_apart(const char* op, const char* name, const at::Tensor& one, const char* other_name,
                 int64_t index, const at::Tensor& other);
// Tensors, message and error share no memory.
void check_encoded_apart(const char* op, at::TensorList tensors, const at::Tensor& message,
                         const std::optional<at::Tensor>& error);

}  // namespace commhook::codecs
