// Runs block codecs on the CPU: one pass over memory; threads share blocks, not tensors. Each codec
// gives its own part as kernels for blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/codecs/block_codec.h"

namespace commhook::codecs {

struct Encoding {
  float scale;
  Rounding rounding;
  bool is_streamed = false;  // codes may be streamed past the caches; the caller fences them
};

// Kernels for `count` values of consecutive blocks; the last block may be shorter.
// encode: writes codes and parameters, and the new errors into `error` unless it is null.
// decode, add: overwrites the values, or adds to them.
// streams: whether encode can stream codes of such blocks itself, given codes aligned to
// kStreamedAlignment. Null if it never does.
// decode_past_caches: decodes whole blocks, of a multiple of kStreamedValues, to an address at
// which a cache line begins. Returns false, and does nothing, if the instruction set has no such
// kernel. Null if none has. The caller fences.
struct BlockKernels {
  void (*encode)(const float* values, int64_t count, int64_t size, const Encoding& encoding,
                 int64_t block, float* error, uint8_t* codes, float* parameters);
  void (*decode)(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
                 float* out);
  void (*add)(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
              float* out);
  bool (*streams)(int64_t size, const Encoding& encoding) = nullptr;
  bool (*decode_past_caches)(const uint8_t* codes, const float* parameters, int64_t count,
                             int64_t size, float* out) = nullptr;
};

constexpr uintptr_t kStreamedAlignment = 16;
constexpr int64_t kStreamedValues = 32;

void encode_on_cpu(const BlockKernels& kernels, at::TensorList tensors, const at::Tensor& message,
                   const Chunks& chunks, double scale, const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding);
void decode_on_cpu(const BlockKernels& kernels, const at::Tensor& message, at::TensorList tensors,
                   const Chunks& chunks);
void decode_sum_on_cpu(const BlockKernels& kernels, const at::Tensor& messages,
                       at::TensorList tensors, const BlockLayout& layout, double scale);
void reduce_on_cpu(const BlockKernels& kernels, const at::Tensor& messages,
                   const at::Tensor& message, const BlockLayout& layout, double scale,
                   const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding);

}  // namespace commhook::codecs
