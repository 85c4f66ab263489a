// Block quantisation: what its operators take, and its kernels in plain ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/codecs/block_codec.h"

namespace commhook::blockwise {

// How values are quantised; see blockwise_math.h.
struct Format {
  int64_t bits;
  int64_t block_size;
  bool is_symmetric;

  codecs::BlockForm form() const { return {block_size, bits, is_symmetric ? 1 : 2}; }
};

Format check_format(const char* op, int64_t bits, int64_t block_size, bool is_symmetric);

namespace reference {
void encode(at::TensorList tensors, const at::Tensor& message, const Format& format,
            const codecs::BlockLayout& layout, double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding);
void decode(const at::Tensor& message, at::TensorList tensors, const Format& format,
            const codecs::BlockLayout& layout);
void reduce(const at::Tensor& messages, const at::Tensor& message, const Format& format,
            const codecs::BlockLayout& layout, double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding);
}  // namespace reference

}  // namespace commhook::blockwise
