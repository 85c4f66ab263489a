// Runs block codecs in plain ATen, on every device. Each codec gives its own part as functions of
// whole blocks.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "ops/bucket/bucket.h"
#include "ops/codecs/block_codec.h"
#include "ops/codecs/block_codec_cpu.h"
#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/codec_reference.h"
#include "ops/cpu/capability.h"

namespace commhook::codecs::reference {

// Encoded blocks of one size.
struct Blocks {
  at::Tensor codes;       // uint8, [blocks, bytes]
  at::Tensor parameters;  // float32, [blocks, parameters]
};

// Visits the whole blocks of each shard together, then the last block if it is shorter:
// visit(shard, first block, first element, blocks, values of each)
template <typename Visit>
void for_each_part(const BlockLayout& layout, const Visit& visit) {
  const int64_t size = layout.form().block_size;
  for (int64_t shard = 0; shard < layout.shards(); ++shard) {
    const int64_t first = layout.first_block(shard);
    const int64_t begin = layout.first_element(shard);
    const int64_t count = layout.first_element(shard + 1) - begin;
    const int64_t whole = count / size;
    if (whole > 0) {
      visit(shard, first, begin, whole, size);
    }
    if (count > whole * size) {
      visit(shard, first + whole, begin + whole * size, int64_t{1}, count - whole * size);
    }
  }
}

// The place of such a part in a message; parameters are seen as bytes.
inline Blocks place_of(const at::Tensor& message, const BlockLayout& layout, int64_t shard,
                       int64_t block, int64_t blocks, int64_t n) {
  const auto& form = layout.form();
  const int64_t before = block - layout.first_block(shard);
  const int64_t base = layout.offset_of_shard(shard);
  const int64_t width = form.code_bytes(n);
  const int64_t each = form.parameters * static_cast<int64_t>(sizeof(float));
  const auto flat = message.view(-1);
  return {flat.narrow(0, base + before * form.code_bytes(form.block_size), blocks * width)
              .view({blocks, width}),
          flat.narrow(0, base + layout.offset_of_parameters(shard) + before * each, blocks * each)
              .view({blocks, each})};
}

// The factor that narrows each block's step and factor: see blockwise::quantizer.
inline at::Tensor narrowing(const at::Tensor& step, const at::Tensor& low, double levels) {
  const auto is_finite = (low + step * levels).isfinite();
  return at::where(is_finite, 1.0, static_cast<double>(blockwise::kNarrowing)).to(at::kFloat);
}

// quantize(values [blocks, n], first block, error) returns Blocks. It writes the new error into
// `error`, of the values' shape, if that is defined.
template <typename Quantize>
void encode_flat(const at::Tensor& p, const at::Tensor& message, const BlockLayout& layout,
                 const std::optional<at::Tensor>& error, const Quantize& quantize) {
  message.zero_();  // the padding
  for_each_part(layout, [&](int64_t shard, int64_t block, int64_t begin, int64_t blocks,
                            int64_t n) {
    const auto lost = is_there(error)
                          ? error->detach().view(-1).narrow(0, begin, blocks * n).view({blocks, n})
                          : at::Tensor();
    const auto made = quantize(p.narrow(0, begin, blocks * n).view({blocks, n}), block, lost);
    const auto place = place_of(message, layout, shard, block, blocks, n);
    place.codes.copy_(made.codes);
    place.parameters.copy_(made.parameters.contiguous().view(at::kByte));
  });
}

// restore(Blocks, n) returns the values, [blocks, n].
template <typename Restore>
at::Tensor decode_flat(const at::Tensor& message, const BlockLayout& layout,
                       const Restore& restore) {
  auto flat = at::empty({layout.numel()}, message.options().dtype(at::kFloat));
  for_each_part(layout,
                [&](int64_t shard, int64_t block, int64_t begin, int64_t blocks, int64_t n) {
                  auto place = place_of(message, layout, shard, block, blocks, n);
                  place.parameters = place.parameters.contiguous().view(at::kFloat);
                  flat.narrow(0, begin, blocks * n).view({blocks, n}).copy_(restore(place, n));
                });
  return flat;
}

// The bytes of a chunk's message.
inline at::Tensor message_of(const at::Tensor& messages, const Chunk& chunk) {
  return messages.view(-1).narrow(0, chunk.offset, chunk.layout.bytes());
}

template <typename Quantize>
void encode(at::TensorList tensors, const at::Tensor& message, const Chunks& chunks, double scale,
            const std::optional<at::Tensor>& error, const Quantize& quantize) {
  const auto p = compensated(flat_of(tensors), scale, error);
  for (const auto& chunk : chunks) {
    const int64_t numel = chunk.layout.numel();
    auto lost = error;
    if (is_there(error)) {
      lost = error->detach().view(-1).narrow(0, chunk.element, numel);
    }
    encode_flat(p.narrow(0, chunk.element, numel), message_of(message, chunk), chunk.layout, lost,
                [&](const at::Tensor& values, int64_t block, const at::Tensor& lost_of_values) {
                  return quantize(values, chunk.block + block, lost_of_values);
                });
  }
}

template <typename Restore>
void decode(const at::Tensor& message, at::TensorList tensors, const Chunks& chunks,
            const Restore& restore) {
  std::vector<at::Tensor> flat;
  for (const auto& chunk : chunks) {
    flat.push_back(decode_flat(message_of(message, chunk), chunk.layout, restore));
  }
  commhook::reference::unflatten_into(at::cat(flat), tensors, 1.0);
}

// The sum of several messages' values, added in their order.
template <typename Restore>
at::Tensor sum_of(const at::Tensor& messages, const BlockLayout& layout, const Restore& restore) {
  at::Tensor sum;
  for (const auto& each : messages.unbind(0)) {
    const auto values = decode_flat(each, layout, restore);
    sum = sum.defined() ? sum + values : values;
  }
  return sum;
}

template <typename Restore>
void decode_sum(const at::Tensor& messages, at::TensorList tensors, const BlockLayout& layout,
                double scale, const Restore& restore) {
  const auto sum = compensated(sum_of(messages, layout, restore), scale, std::nullopt);
  commhook::reference::unflatten_into(sum, tensors, 1.0);
}

template <typename Quantize, typename Restore>
void reduce(const at::Tensor& messages, const at::Tensor& message, const BlockLayout& layout,
            double scale, const std::optional<at::Tensor>& error, const Quantize& quantize,
            const Restore& restore) {
  const auto sum = sum_of(messages, layout, restore);
  encode_flat(compensated(sum, scale, error), message, layout, error, quantize);
}

}  // namespace commhook::codecs::reference

namespace commhook::codecs {

// The kernels for the CPU, and plain ATen for all other devices. Own gives a codec's own part:
// on_cpu(format), quantize(format, rounding) and restore(format).
template <typename Own>
struct HostKernels {
  template <typename Format>
  static void encode(const char* /*op*/, const Format& format, at::TensorList tensors,
                     const at::Tensor& message, const Chunks& chunks, double scale,
                     const std::optional<at::Tensor>& error,
                     const std::optional<at::Tensor>& rounding) {
    if (cpu::serve(message.device())) {
      encode_on_cpu(Own::on_cpu(format), tensors, message, chunks, scale, error, rounding);
    } else {
      reference::encode(tensors, message, chunks, scale, error, Own::quantize(format, rounding));
    }
  }

  template <typename Format>
  static void decode(const char* /*op*/, const Format& format, const at::Tensor& message,
                     at::TensorList tensors, const Chunks& chunks) {
    if (cpu::serve(message.device())) {
      decode_on_cpu(Own::on_cpu(format), message, tensors, chunks);
    } else {
      reference::decode(message, tensors, chunks, Own::restore(format));
    }
  }

  template <typename Format>
  static void decode_sum(const char* /*op*/, const Format& format, const at::Tensor& messages,
                         at::TensorList tensors, const BlockLayout& layout, double scale) {
    if (cpu::serve(messages.device())) {
      decode_sum_on_cpu(Own::on_cpu(format), messages, tensors, layout, scale);
    } else {
      reference::decode_sum(messages, tensors, layout, scale, Own::restore(format));
    }
  }

  template <typename Format>
  static void reduce(const char* /*op*/, const Format& format, const at::Tensor& messages,
                     const at::Tensor& message, const BlockLayout& layout, double scale,
                     const std::optional<at::Tensor>& error,
                     const std::optional<at::Tensor>& rounding) {
    if (cpu::serve(message.device())) {
      reduce_on_cpu(Own::on_cpu(format), messages, message, layout, scale, error, rounding);
    } else {
      reference::reduce(messages, message, layout, scale, error, Own::quantize(format, rounding),
                        Own::restore(format));
    }
  }

  // Reads the shards as one matrix. Writes nothing if the exchange has failed.
  template <typename Format>
  static void reduce_shards(const char* op, const Format& format, at::TensorList messages,
                            const at::Tensor& message, const BlockLayout& layout, double scale,
                            const std::optional<at::Tensor>& error,
                            const std::optional<at::Tensor>& rounding,
                            const std::optional<at::Tensor>& failed) {
    if (symmetric::has_failed(failed)) {
      return;  // other ranks may still be reading the previous sum
    }
    std::vector<at::Tensor> rows;
    for (const auto& each : messages) {
      rows.push_back(each.view({-1}));  // messages may be of any shape
    }
    reduce(op, format, at::stack(rows), message, layout, scale, error, rounding);
  }
};

}  // namespace commhook::codecs
