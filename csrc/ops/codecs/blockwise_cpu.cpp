// Block quantisation on the CPU: one pass over memory, split over blocks, not tensors.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/bucket.h"
#include "ops/codecs/blockwise.h"
#include "ops/codecs/blockwise_checks.h"
#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/philox.h"
#include "ops/cpu/blocks.h"

namespace commhook::cpu {
namespace {

using namespace blockwise;  // NOLINT: the kernels' own names
static_assert(kMaxBlockSize <= kMaxBlock);

// For `count` values of blocks that follow each other, the last perhaps shorter.
// encode: into codes and parameters, and what is lost into `error`, if there is one.
// decode, add: over what is there, or added to it.
struct Kernels {
  void (*encode)(const float* values, int64_t count, int64_t size, const Encoding& encoding,
                 int64_t block, float* error, uint8_t* codes, float* parameters);
  void (*decode)(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
                 float* out);
  void (*add)(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
              float* out);
};

#define COMMHOOK_KERNELS "ops/codecs/blockwise_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

const Kernels& kernels_for(const Format& format) {
  return COMMHOOK_CHOOSE(kKernels)[format.bits == 8 ? 1 : 0][format.is_symmetric ? 1 : 0];
}

// Below this a thread costs more to wake than it saves.
constexpr int64_t kGrainElements = 64 * 1024;

// Where blocks of a message lie, asked in the order of the blocks.
class Cursor {
 public:
  Cursor(const Layout& layout, int64_t block) : layout_(layout) {
    enter(layout.shard_of_block(block));
  }

  // Calls visit(offset, elements, block, offset of codes, offset of parameters) for the parts of
  // the elements [position, position + count), which begin with a block, that lie in one shard.
  template <typename Visit>
  void visit(int64_t position, int64_t count, const Visit& visit) {
    const auto& format = layout_.format();
    for (int64_t done = 0; done < count;) {
      while (position + done >= end_) {
        enter(shard_ + 1);
      }
      const int64_t n = std::min(count - done, end_ - position - done);
      const int64_t block = (position + done) / format.block_size;
      const int64_t before = block - first_;
      visit(done, n, block, codes_ + before * format.code_bytes(format.block_size),
            parameters_ + before * format.parameters() * static_cast<int64_t>(sizeof(float)));
      done += n;
    }
  }

 private:
  void enter(int64_t shard) {
    shard_ = shard;
    first_ = layout_.first_block(shard);
    end_ = layout_.first_element(shard + 1);
    codes_ = layout_.offset_of_shard(shard);
    parameters_ = codes_ + layout_.offset_of_parameters(shard);
  }

  const Layout& layout_;
  int64_t shard_ = 0;
  int64_t first_ = 0;  // block
  int64_t end_ = 0;    // element
  int64_t codes_ = 0;
  int64_t parameters_ = 0;
};

// Calls run(first block, last block, first element, last element) on all threads.
template <typename Run>
void for_each_range(const Layout& layout, int64_t numel, const Run& run) {
  const int64_t size = layout.format().block_size;
  at::parallel_for(
      0, layout.blocks(), std::max<int64_t>(1, kGrainElements / size),
      [&](int64_t first, int64_t last) { run(first, first * size, std::min(numel, last * size)); });
}

float* data_of(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? tensor->mutable_data_ptr<float>() : nullptr;
}

// Between the codes of a shard and its parameters.
void clear_fill(const Layout& layout, int64_t shards, uint8_t* message) {
  const auto& format = layout.format();
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t count = layout.first_element(shard + 1) - layout.first_element(shard);
    const int64_t whole = count / format.block_size;
    const int64_t used = whole * format.code_bytes(format.block_size) +
                         format.code_bytes(count - whole * format.block_size);
    const int64_t end = layout.offset_of_parameters(shard);
    std::fill(message + layout.offset_of_shard(shard) + used,
              message + layout.offset_of_shard(shard) + end, uint8_t{0});
  }
}

void encode(at::TensorList tensors, const at::Tensor& message, int64_t bits, int64_t block_size,
            bool symmetric, int64_t shards, double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding) {
  const auto format = check_format("blockwise_encode", bits, block_size, symmetric);
  const auto arguments = check_encode(tensors, message, format, shards, error, rounding);
  if (capability() == Capability::kReference) {
    return blockwise::reference::encode(tensors, message, arguments, scale, error, rounding);
  }
  const auto& layout = arguments.layout;
  const auto& kernels = kernels_for(format);
  const Encoding encoding{static_cast<float>(scale), rounding_of(rounding)};
  const Segments segments(tensors);
  auto* const bytes = message.mutable_data_ptr<uint8_t>();
  float* const lost = data_of(error);
  clear_fill(layout, shards, bytes);
  for_each_range(layout, arguments.numel, [&](int64_t block, int64_t begin, int64_t end) {
    Cursor cursor(layout, block);
    for_each_block(
        segments, begin, end, block_size, row_kernels(capability()),
        [&](const float* values, int64_t position, int64_t count) {
          cursor.visit(
              position, count,
              [&](int64_t at, int64_t n, int64_t first, int64_t codes, int64_t parameters) {
                kernels.encode(values + at, n, block_size, encoding, first,
                               lost == nullptr ? nullptr : lost + position + at, bytes + codes,
                               reinterpret_cast<float*>(bytes + parameters));
              });
        });
  });
}

void decode(const at::Tensor& message, at::TensorList tensors, int64_t bits, int64_t block_size,
            bool symmetric, int64_t shards) {
  const auto format = check_format("blockwise_decode", bits, block_size, symmetric);
  const auto arguments = check_decode(message, tensors, format, shards);
  if (capability() == Capability::kReference) {
    return blockwise::reference::decode(message, tensors, arguments);
  }
  const auto& layout = arguments.layout;
  const auto& kernels = kernels_for(format);
  for (const auto& tensor : tensors) {
    tensor.mutable_data_ptr();  // a lazily copied storage becomes the tensor's own here
  }
  const Segments segments(tensors);
  const auto* const bytes = message.const_data_ptr<uint8_t>();
  for_each_range(layout, arguments.numel, [&](int64_t block, int64_t begin, int64_t end) {
    Cursor cursor(layout, block);
    write_each_block(segments, begin, end, block_size, row_kernels(capability()),
                     [&](float* values, int64_t position, int64_t count) {
                       cursor.visit(
                           position, count,
                           [&](int64_t at, int64_t n, int64_t, int64_t codes, int64_t parameters) {
                             kernels.decode(bytes + codes,
                                            reinterpret_cast<const float*>(bytes + parameters), n,
                                            block_size, values + at);
                           });
                     });
  });
}

void reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel, int64_t bits,
            int64_t block_size, bool symmetric, double scale,
            const std::optional<at::Tensor>& error, const std::optional<at::Tensor>& rounding) {
  const auto format = check_format("blockwise_reduce", bits, block_size, symmetric);
  const auto arguments = check_reduce(messages, message, format, numel, error, rounding);
  if (capability() == Capability::kReference) {
    return blockwise::reference::reduce(messages, message, arguments, scale, error, rounding);
  }
  const auto& layout = arguments.layout;
  const auto& kernels = kernels_for(format);
  const Encoding encoding{static_cast<float>(scale), rounding_of(rounding)};
  const auto* const from = messages.const_data_ptr<uint8_t>();
  const int64_t count_of_messages = messages.size(0);
  const int64_t bytes_of_message = layout.bytes();
  auto* const to = message.mutable_data_ptr<uint8_t>();
  float* const lost = data_of(error);
  clear_fill(layout, 1, to);
  for_each_range(layout, numel, [&](int64_t block, int64_t begin, int64_t end) {
    Cursor cursor(layout, block);
    alignas(64) float sum[kMaxBlockSize];
    const int64_t most = kMaxBlockSize / block_size * block_size;
    for (int64_t position = begin; position < end; position += most) {
      cursor.visit(position, std::min(most, end - position),
                   [&](int64_t at, int64_t n, int64_t first, int64_t codes, int64_t parameters) {
                     for (int64_t i = 0; i < count_of_messages; ++i) {
                       const auto* const each = from + i * bytes_of_message;
                       (i == 0 ? kernels.decode : kernels.add)(
                           each + codes, reinterpret_cast<const float*>(each + parameters), n,
                           block_size, sum);
                     }
                     kernels.encode(sum, n, block_size, encoding, first,
                                    lost == nullptr ? nullptr : lost + position + at, to + codes,
                                    reinterpret_cast<float*>(to + parameters));
                   });
    }
  });
}

TORCH_LIBRARY_IMPL(commhook, CPU, m) {
  m.impl("blockwise_encode", encode);
  m.impl("blockwise_decode", decode);
  m.impl("blockwise_reduce", reduce);
}

}  // namespace
}  // namespace commhook::cpu
