#include "ops/codecs/block_codec_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "ops/codecs/error_memory.h"
#include "ops/cpu/blocks.h"
#include "ops/cpu/streaming.h"

namespace commhook::codecs {
namespace {

static_assert(kMaxBlockSize <= cpu::kMaxBlock);
static_assert(kMaxBlockSize * static_cast<int64_t>(sizeof(float)) <= cpu::Stream::kMost);

// With fewer elements, waking a thread costs more than it saves.
constexpr int64_t kGrainElements = 64 * 1024;

// Finds the places of a message's blocks; asks must come in the order of the blocks.
class BlockCursor {
 public:
  BlockCursor(const BlockLayout& layout, int64_t block) : layout_(layout) {
    enter(layout.shard_of_block(block));
  }

  // Splits the elements [position, position + count), which begin with a block, by shard. Calls
  // visit(offset, elements, block, offset of codes, offset of parameters) for each part.
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

// Calls run(chunk, first block, first element, last element) on all threads. Positions count from
// the chunk's beginning.
template <typename Run>
void for_each_range(const Chunks& chunks, const Run& run) {
  const int64_t size = chunks.form().block_size;
  at::parallel_for(
      0, chunks.blocks(), std::max<int64_t>(1, kGrainElements / size),
      [&](int64_t first, int64_t last) {
        auto chunk =
            std::upper_bound(chunks.begin(), chunks.end(), first,
                             [](int64_t block, const Chunk& each) { return block < each.block; });
        for (--chunk; chunk != chunks.end() && chunk->block < last; ++chunk) {
          const int64_t begin = std::max(first - chunk->block, int64_t{0});
          const int64_t end = std::min(last - chunk->block, chunk->layout.blocks());
          if (begin < end) {
            run(*chunk, begin, begin * size, std::min(chunk->layout.numel(), end * size));
          }
        }
      });
}

// The number of bytes that are collected before they are streamed.
constexpr int64_t kStreamedBytes = 4096;

// The number of values, in whole blocks, that fill about `bytes` bytes at `bits` bits each.
int64_t values_in(int64_t bytes, int64_t bits, int64_t block_size) {
  return std::max<int64_t>(1, bytes * 8 / bits / block_size) * block_size;
}

// Zeroes the padding of a message.
void clear(uint8_t* message, const BlockLayout& layout) {
  for (int64_t shard = 0; shard < layout.shards(); ++shard) {
    for (const auto& fill : {layout.fill_of_codes(shard), layout.fill_of_parameters(shard)}) {
      std::fill(message + fill.begin, message + fill.end, uint8_t{0});
    }
  }
}

// The parameters' bytes for the blocks of so many values.
int64_t parameter_bytes(const BlockForm& form, int64_t values) {
  return (values + form.block_size - 1) / form.block_size * form.parameters *
         static_cast<int64_t>(sizeof(float));
}

// Streams a message's codes and parameters past the caches. The destructors' fence also covers the
// stores that kernels stream themselves.
struct MessageStreams {
  MessageStreams(const cpu::RowKernels& rows, const BlockForm& form)
      : piece(values_in(kStreamedBytes, form.bits, form.block_size)),
        codes(rows, std::max(kStreamedBytes, form.code_bytes(piece))),
        parameters(rows, std::max(kStreamedBytes, parameter_bytes(form, piece))) {}

  const int64_t piece;  // values that are encoded at once
  cpu::Stream codes;
  cpu::Stream parameters;
};

// Shorter runs, such as those of converted tensors, come too often for a stream of parameters.
constexpr int64_t kFewValues = 1024;

// Encodes the values of consecutive blocks past the caches, without errors.
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
  // If the kernel streams the codes itself, a piece is as large as its parameters allow.
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

// Decodes several messages of `bytes` bytes each, from `codes` and `parameters` on, and writes
// their sum. Adds in the order of the messages.
void add_up(const BlockKernels& kernels, const uint8_t* messages, int64_t count, int64_t bytes,
            int64_t codes, int64_t parameters, int64_t n, int64_t size, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const auto* const each = messages + i * bytes;
    (i == 0 ? kernels.decode : kernels.add)(
        each + codes, reinterpret_cast<const float*>(each + parameters), n, size, out);
  }
}

// The number of values, in whole blocks, that stay in the first-level cache while messages are
// added.
int64_t values_at_once(int64_t size) { return kMaxBlockSize / size * size; }

// Rounds to the nearest: a block's error does not grow over many steps.
ErrorMemory memory_of(const std::optional<at::Tensor>& error) { return {error, Rounding{}}; }

// Encodes the values of consecutive blocks, with the errors from `position` on.
void encode_run(const BlockKernels& kernels, const BlockForm& form, const float* values,
                int64_t count, const Encoding& encoding, int64_t block, const ErrorMemory& error,
                int64_t position, uint8_t* codes, float* parameters) {
  const int64_t size = form.block_size;
  if (!error.is_narrow()) {
    float* const lost = error.is_there() ? error.in_place() + position : nullptr;
    return kernels.encode(values, count, size, encoding, block, lost, codes, parameters);
  }
  alignas(64) float lost[kMaxBlockSize];
  const int64_t piece = values_at_once(size);
  for (int64_t i = 0; i < count; i += piece) {
    const int64_t n = std::min(piece, count - i);
    error.read(position + i, n, lost);
    kernels.encode(values + i, n, size, encoding, block + i / size, lost, codes, parameters);
    error.write(position + i, n, lost);
    codes += form.code_bytes(n);
    parameters += piece / size * form.parameters;
  }
}

}  // namespace

void encode_on_cpu(const BlockKernels& kernels, at::TensorList tensors, const at::Tensor& message,
                   const Chunks& chunks, double scale, const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding) {
  const auto& form = chunks.form();
  const int64_t size = form.block_size;
  const Encoding encoding{static_cast<float>(scale), rounding_of(rounding)};
  const cpu::Segments segments(tensors);
  auto* const all = message.mutable_data_ptr<uint8_t>();
  for (const auto& chunk : chunks) {
    clear(all + chunk.offset, chunk.layout);
  }
  const auto lost = memory_of(error);
  const auto& rows = cpu::row_kernels(cpu::capability());
  // Streaming does not pay with an error, which is read and written.
  const bool streamed = !lost.is_there() && chunks.bytes() >= cpu::streaming_bytes();
  for_each_range(chunks, [&](const Chunk& chunk, int64_t block, int64_t begin, int64_t end) {
    BlockCursor cursor(chunk.layout, block);
    MessageStreams streams(rows, form);
    auto* const bytes = all + chunk.offset;
    cpu::for_each_block(
        segments, chunk.element + begin, chunk.element + end, size, rows,
        [&](const float* values, int64_t position, int64_t count) {
          cursor.visit(
              position - chunk.element, count,
              [&](int64_t at, int64_t n, int64_t first, int64_t codes, int64_t parameters) {
                auto* const to = reinterpret_cast<float*>(bytes + parameters);
                if (streamed) {
                  stream_run(kernels, form, values + at, n, encoding, chunk.block + first,
                             bytes + codes, to, streams);
                } else {
                  encode_run(kernels, form, values + at, n, encoding, chunk.block + first, lost,
                             position + at, bytes + codes, to);
                }
              });
        });
  });
}

void decode_on_cpu(const BlockKernels& kernels, const at::Tensor& message, at::TensorList tensors,
                   const Chunks& chunks) {
  const auto& form = chunks.form();
  const int64_t size = form.block_size;
  for (const auto& tensor : tensors) {
    tensor.mutable_data_ptr();  // makes a lazily copied storage the tensor's own
  }
  const cpu::Segments segments(tensors);
  const auto* const all = message.const_data_ptr<uint8_t>();
  const auto& rows = cpu::row_kernels(cpu::capability());
  const bool streamed = cpu::copies_past_caches(cpu::bytes_of(message), cpu::bytes_of(tensors));
  for_each_range(chunks, [&](const Chunk& chunk, int64_t block, int64_t begin, int64_t end) {
    BlockCursor cursor(chunk.layout, block);
    cpu::Stream stream(rows, cpu::Stream::kMost);
    const auto* const bytes = all + chunk.offset;
    cpu::write_each_block(
        segments, chunk.element + begin, chunk.element + end, size, rows,
        [&](float* values, int64_t position, int64_t count, bool in_place) {
          cursor.visit(position - chunk.element, count,
                       [&](int64_t at, int64_t n, int64_t, int64_t codes, int64_t parameters) {
                         const auto* from = reinterpret_cast<const float*>(bytes + parameters);
                         if (streamed && in_place) {
                           decode_run(kernels, form, bytes + codes, from, n, values + at, stream);
                         } else {
                           kernels.decode(bytes + codes, from, n, size, values + at);
                         }
                       });
        });
  });
}

void decode_sum_on_cpu(const BlockKernels& kernels, const at::Tensor& messages,
                       at::TensorList tensors, const BlockLayout& layout, double scale) {
  const int64_t size = layout.form().block_size;
  const auto factor = static_cast<float>(scale);
  for (const auto& tensor : tensors) {
    tensor.mutable_data_ptr();  // makes a lazily copied storage the tensor's own
  }
  const cpu::Segments segments(tensors);
  const auto* const from = messages.const_data_ptr<uint8_t>();
  const auto& rows = cpu::row_kernels(cpu::capability());
  const int64_t most = values_at_once(size);
  const Chunks whole(layout.form(), layout.numel(), layout.shards());
  for_each_range(whole, [&](const Chunk&, int64_t block, int64_t begin, int64_t end) {
    BlockCursor cursor(layout, block);
    cpu::write_each_block(
        segments, begin, end, size, rows,
        [&](float* values, int64_t position, int64_t count, bool /*in_place*/) {
          for (int64_t done = 0; done < count; done += most) {
            cursor.visit(position + done, std::min(most, count - done),
                         [&](int64_t at, int64_t n, int64_t, int64_t codes, int64_t parameters) {
                           float* const out = values + done + at;
                           add_up(kernels, from, messages.size(0), layout.bytes(), codes,
                                  parameters, n, size, out);
                           if (factor != 1.0f) {
                             std::transform(out, out + n, out,
                                            [&](float value) { return value * factor; });
                           }
                         });
          }
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
  auto* const to = message.mutable_data_ptr<uint8_t>();
  clear(to, layout);
  const auto lost = memory_of(error);
  const Chunks whole(layout.form(), layout.numel(), layout.shards());
  for_each_range(whole, [&](const Chunk&, int64_t block, int64_t begin, int64_t end) {
    BlockCursor cursor(layout, block);
    alignas(64) float sum[kMaxBlockSize];
    const int64_t most = values_at_once(size);
    for (int64_t position = begin; position < end; position += most) {
      cursor.visit(position, std::min(most, end - position),
                   [&](int64_t at, int64_t n, int64_t first, int64_t codes, int64_t parameters) {
                     add_up(kernels, from, messages.size(0), layout.bytes(), codes, parameters, n,
                            size, sum);
                     encode_run(kernels, layout.form(), sum, n, encoding, first, lost,
                                position + at, to + codes,
                                reinterpret_cast<float*>(to + parameters));
                   });
    }
  });
}

}  // namespace commhook::codecs
