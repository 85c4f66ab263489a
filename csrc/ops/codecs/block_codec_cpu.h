// How block codecs run on the CPU: one pass over memory, split over blocks, not tensors. What is
// theirs is given as kernels of blocks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/codecs/block_codec.h"

namespace commhook::codecs {

struct Encoding {
  float scale;
  Rounding rounding;
  bool is_streamed = false;  // codes may go past the caches, and are fenced by the caller
};

// For `count` values of blocks that follow each other, the last perhaps shorter.
// encode: into codes and parameters, and what is lost into `error`, if there is one.
// decode, add: over what is there, or added to it.
// streams: whether encode writes codes past the caches by itself where it may, for blocks of such a
// size and codes that are aligned to kStreamedAlignment; null if it never does.
// decode_past_caches: the same for whole blocks of a multiple of kStreamedValues, to where a cache
// line begins; false, and nothing done, where the instruction set does not; null if none does. The
// caller fences.
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
