#include "ops/codecs/block_codec_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/cpu/blocks.h"
#include "ops/cpu/streaming.h"

namespace commhook::codecs {
namespace {

static_assert(kMaxBlockSize <= cpu::kMaxBlock);
static_assert(kMaxBlockSize * static_cast<int64_t>(sizeof(float)) <= cpu::Stream::kMost);

// Below this a thread costs more to wake than it saves.
constexpr int64_t kGrainElements = 64 * 1024;

// Where blocks of a message lie, asked in the order of the blocks.
class BlockCursor {
 public:
  BlockCursor(const BlockLayout& layout, int64_t block) : layout_(layout) {
    enter(layout.shard_of_block(block));
  }

  // Calls visit(offset, elements, block, offset of codes, offset of parameters) for the parts of
  // the elements [position, position + count), which begin with a block, that lie in one shard.
  template <typename Visit>
  void visit(int64_t position, int64_t count, const Visit& visit) {
    const auto& form = layout_.form();
    for (int64_t done = 0; done < count;) {
      while (position + done >= end_) {
        enter(shard_ + 1);
      }
      const int64_t n = std::min(count - done, end_ - position - done);
      const int64_t block = (position + done) / form.block_size;
      const int64_t before = block - first_;
      visit(done, n, block, codes_ + before * form.code_bytes(form.block_size),
            parameters_ + before * form.parameters * static_cast<int64_t>(sizeof(float)));
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

  const BlockLayout& layout_;
  int64_t shard_ = 0;
  int64_t first_ = 0;  // block
  int64_t end_ = 0;    // element
  int64_t codes_ = 0;
  int64_t parameters_ = 0;
};

// Calls run(first block, first element, last element) on all threads.
template <typename Run>
void for_each_range(const BlockLayout& layout, const Run& run) {
  const int64_t size = layout.form().block_size;
  at::parallel_for(0, layout.blocks(), std::max<int64_t>(1, kGrainElements / size),
                   [&](int64_t first, int64_t last) {
                     run(first, first * size, std::min(layout.numel(), last * size));
                   });
}

// That are collected before they go.
constexpr int64_t kStreamedBytes = 4096;

// The number of values, of whole blocks, whose `bits` fill about so many bytes.
int64_t values_in(int64_t bytes, int64_t bits, int64_t block_size) {
  return std::max<int64_t>(1, bytes * 8 / bits / block_size) * block_size;
}

float* data_of(const std::optional<at::Tensor>& tensor) {
  return is_there(tensor) ? tensor->mutable_data_ptr<float>() : nullptr;
}

// The bytes of a message that is to be written.
uint8_t* cleared(const at::Tensor& message, const BlockLayout& layout) {
  auto* const bytes = message.mutable_data_ptr<uint8_t>();
  const auto fill = layout.fill();
  std::fill(bytes + fill.begin, bytes + fill.end, uint8_t{0});
  return bytes;
}

// The bytes of what describes the blocks of so many values.
int64_t parameter_bytes(const BlockForm& form, int64_t values) {
  return (values + form.block_size - 1) / form.block_size * form.parameters *
         static_cast<int64_t>(sizeof(float));
}

// The two parts of a message, on their way past the caches. Their end fences what kernels have
// written past the caches themselves, too.
struct MessageStreams {
  MessageStreams(const cpu::RowKernels& rows, const BlockForm& form)
      : piece(values_in(kStreamedBytes, form.bits, form.block_size)),
        codes(rows, std::max(kStreamedBytes, form.code_bytes(piece))),
        parameters(rows, std::max(kStreamedBytes, parameter_bytes(form, piece))) {}

  const int64_t piece;  // so many values at once
  cpu::Stream codes;
  cpu::Stream parameters;
};

// Fewer values, as of tensors that are converted first, come too often for a stream of parameters.
constexpr int64_t kFewValues = 1024;

// Encodes the values of blocks that follow each other, without errors, past the caches.
void stream_run(const BlockKernels& kernels, const BlockForm& form, const float* values,
                int64_t count, Encoding encoding, int64_t block, uint8_t* codes, float* parameters,
                MessageStreams& streams) {
  const int64_t size = form.block_size;
  if (count < kFewValues) {
    void* const to = streams.codes.place(codes, form.code_bytes(count));
    return kernels.encode(values, count, size, encoding, block, nullptr, static_cast<uint8_t*>(to),
                          parameters);
  }
  encoding.is_streamed = kernels.streams != nullptr && kernels.streams(size, encoding) &&
                         reinterpret_cast<uintptr_t>(codes) % kStreamedAlignment == 0;
  // Of codes that go by themselves, pieces as large as their parameters allow.
  const int64_t piece =
      encoding.is_streamed ? kStreamedBytes / parameter_bytes(form, 1) * size : streams.piece;
  for (int64_t i = 0; i < count; i += piece) {
    const int64_t n = std::min(piece, count - i);
    const int64_t width = form.code_bytes(n);
    const int64_t described = parameter_bytes(form, n);
    void* const to = encoding.is_streamed ? codes : streams.codes.place(codes, width);
    kernels.encode(values + i, n, size, encoding, block + i / size, nullptr,
                   static_cast<uint8_t*>(to),
                   static_cast<float*>(streams.parameters.place(parameters, described)));
    codes += width;
    parameters += described / static_cast<int64_t>(sizeof(float));
  }
}

void decode_run(const BlockKernels& kernels, const BlockForm& form, const uint8_t* codes,
                const float* parameters, int64_t count, float* values, cpu::Stream& stream) {
  const int64_t size = form.block_size;
  const int64_t whole = count / size * size;
  if (kernels.decode_past_caches != nullptr && size % kStreamedValues == 0 &&
      reinterpret_cast<uintptr_t>(values) % cpu::kCacheLine == 0 &&
      kernels.decode_past_caches(codes, parameters, whole, size, values)) {
    codes += form.code_bytes(whole);
    parameters += whole / size * form.parameters;
    values += whole;
    count -= whole;
  }
  const int64_t piece = values_in(kStreamedBytes, 32, size);
  for (int64_t i = 0; i < count; i += piece) {
    const int64_t n = std::min(piece, count - i);
    kernels.decode(
        codes, parameters, n, size,
        static_cast<float*>(stream.place(values + i, n * static_cast<int64_t>(sizeof(float)))));
    codes += form.code_bytes(n);
    parameters += piece / size * form.parameters;
  }
}

}  // namespace

void encode_on_cpu(const BlockKernels& kernels, at::TensorList tensors, const at::Tensor& message,
                   const BlockLayout& layout, double scale, const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding) {
  const int64_t size = layout.form().block_size;
  const Encoding encoding{static_cast<float>(scale), rounding_of(rounding)};
  const cpu::Segments segments(tensors);
  auto* const bytes = cleared(message, layout);
  float* const lost = data_of(error);
  const auto& rows = cpu::row_kernels(cpu::capability());
  // With an error, which is read and written, it does not pay.
  const bool streamed = lost == nullptr && layout.bytes() >= cpu::streaming_bytes();
  for_each_range(layout, [&](int64_t block, int64_t begin, int64_t end) {
    BlockCursor cursor(layout, block);
    MessageStreams streams(rows, layout.form());
    cpu::for_each_block(
        segments, begin, end, size, rows,
        [&](const float* values, int64_t position, int64_t count) {
          cursor.visit(
              position, count,
              [&](int64_t at, int64_t n, int64_t first, int64_t codes, int64_t parameters) {
                auto* const to = reinterpret_cast<float*>(bytes + parameters);
                if (streamed) {
                  stream_run(kernels, layout.form(), values + at, n, encoding, first, bytes + codes,
                             to, streams);
                } else {
                  kernels.encode(values + at, n, size, encoding, first,
                                 lost == nullptr ? nullptr : lost + position + at, bytes + codes,
                                 to);
                }
              });
        });
  });
}

void decode_on_cpu(const BlockKernels& kernels, const at::Tensor& message, at::TensorList tensors,
                   const BlockLayout& layout) {
  const int64_t size = layout.form().block_size;
  for (const auto& tensor : tensors) {
    tensor.mutable_data_ptr();  // a lazily copied storage becomes the tensor's own here
  }
  const cpu::Segments segments(tensors);
  const auto* const bytes = message.const_data_ptr<uint8_t>();
  const auto& rows = cpu::row_kernels(cpu::capability());
  const bool streamed = cpu::bytes_of(tensors) >= cpu::streaming_bytes();
  for_each_range(layout, [&](int64_t block, int64_t begin, int64_t end) {
    BlockCursor cursor(layout, block);
    cpu::Stream stream(rows, cpu::Stream::kMost);
    cpu::write_each_block(
        segments, begin, end, size, rows,
        [&](float* values, int64_t position, int64_t count, bool in_place) {
          cursor.visit(position, count,
                       [&](int64_t at, int64_t n, int64_t, int64_t codes, int64_t parameters) {
                         const auto* from = reinterpret_cast<const float*>(bytes + parameters);
                         if (streamed && in_place) {
                           decode_run(kernels, layout.form(), bytes + codes, from, n, values + at,
                                      stream);
                         } else {
                           kernels.decode(bytes + codes, from, n, size, values + at);
                         }
                       });
        });
  });
}

void reduce_on_cpu(const BlockKernels& kernels, const at::Tensor& messages,
                   const at::Tensor& message, const BlockLayout& layout, double scale,
                   const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding) {
  const int64_t size = layout.form().block_size;
  const Encoding encoding{static_cast<float>(scale), rounding_of(rounding)};
  const auto* const from = messages.const_data_ptr<uint8_t>();
  const int64_t count_of_messages = messages.size(0);
  const int64_t bytes_of_message = layout.bytes();
  auto* const to = cleared(message, layout);
  float* const lost = data_of(error);
  for_each_range(layout, [&](int64_t block, int64_t begin, int64_t end) {
    BlockCursor cursor(layout, block);
    alignas(64) float sum[kMaxBlockSize];
    const int64_t most = kMaxBlockSize / size * size;
    for (int64_t position = begin; position < end; position += most) {
      cursor.visit(position, std::min(most, end - position),
                   [&](int64_t at, int64_t n, int64_t first, int64_t codes, int64_t parameters) {
                     for (int64_t i = 0; i < count_of_messages; ++i) {
                       const auto* const each = from + i * bytes_of_message;
                       (i == 0 ? kernels.decode : kernels.add)(
                           each + codes, reinterpret_cast<const float*>(each + parameters), n, size,
                           sum);
                     }
                     kernels.encode(sum, n, size, encoding, first,
                                    lost == nullptr ? nullptr : lost + position + at, to + codes,
                                    reinterpret_cast<float*>(to + parameters));
                   });
    }
  });
}

}  // namespace commhook::codecs
