// 8-bit floats with a scale for each block: what the operators take, and their kernels in plain
// ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "ops/codecs/block_codec.h"

namespace commhook::fp8 {

struct Format {
  bool is_e5m2;
  codecs::BlockForm form;
};

// format: "e4m3" or "e5m2".
Format check_format(const char* op, std::string_view format, int64_t block_size);

namespace reference {
void encode(at::TensorList tensors, const at::Tensor& message, const Format& format,
            const codecs::BlockLayout& layout, double scale,
            const std::optional<at::Tensor>& error);
void decode(const at::Tensor& message, at::TensorList tensors, const Format& format,
            const codecs::BlockLayout& layout);
void reduce(const at::Tensor& messages, const at::Tensor& message, const Format& format,
            const codecs::BlockLayout& layout, double scale,
            const std::optional<at::Tensor>& error);
}  // namespace reference

}  // namespace commhook::fp8
