// The kernels of codecs that send values in blocks, and their launches. Each codec's own part is in
// its *_block.h; block_tile.cuh has the steps of a warp.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <type_traits>

#include "block_tile.cuh"
#include "bucket_launch.h"
#include "error_launch.h"
#include "launch.cuh"
#include "ops/codecs/block_codec.h"
#include "register_kernels.cuh"
#include "row.h"
#include "sources.h"

namespace commhook::cuda {

// key_of() for a message that may have no random numbers: then rounding is null.
template <typename Codec>
__device__ DitherKey dither_key(const int64_t* rounding, int64_t block) {
  return Codec::kIsRandom && rounding != nullptr ? key_of(rounding, block) : DitherKey{};
}

// Calls visit(first block, elements) for each tile of this thread's warp. Positions of the elements
// count from the launch's first one; the launch has `total`.
template <typename Visit>
__device__ void for_each_tile(const BlockWork& work, const BlockTile& tile, int64_t total,
                              const Visit& visit) {
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int64_t values = values_of(tile, work.block_size);
  int64_t index = (int64_t{blockIdx.x} * warps + warp_of_block()) * work.tiles;
  for (int i = 0; i < work.tiles; ++i, ++index) {
    const int64_t begin = index * values;
    if (begin >= total) {
      return;
    }
    visit((work.first + index) * tile.blocks, Run{begin, min(total, begin + values)});
  }
}

// Kernels with random numbers need more registers.
template <typename Codec, int kCapacity>
__global__ void __launch_bounds__(kThreads, Codec::kIsRandom ? 2 : 3)
    encode_kernel(const __grid_constant__ TensorTable<const void, kCapacity> table,
                  const BlockWork work, const int64_t* rounding, float* error, uint8_t* message) {
  const Codec codec;
  const int lane = lane_of_warp();
  const auto tile = tile_of<Codec>(work.block_size);
  const auto layout = layout_of<Codec>(work);
  const auto key = dither_key<Codec>(rounding, work.block);
  float* const values = shared_values(shared_bytes(tile, work.block_size, key.is_random));
  for_each_tile(work, tile, table.total, [&](int64_t first, const Run& run) {
    NoMeasure meter;
    flatten_run(table, values - run.begin, 1.0, run, lane, meter);
    __syncwarp();
    encode_tile<false>(codec, layout, tile, first, length_of(run), lane, work.scale, key, values,
                       error, message);
  });
}

// The minimum number of blocks of a kernel that decodes in a multiprocessor. Without it, the
// compiler spills registers to make room for one more block.
template <typename Codec>
constexpr int kDecodeBlocks = Codec::kBits == 4 ? 1 : 2;

template <typename Codec, int kCapacity>
__global__ void __launch_bounds__(kThreads, kDecodeBlocks<Codec>)
    decode_kernel(const __grid_constant__ TensorTable<void, kCapacity> table, const BlockWork work,
                  const uint8_t* messages, int64_t count) {
  const Codec codec;
  const int lane = lane_of_warp();
  const auto tile = tile_of<Codec>(work.block_size);
  const auto layout = layout_of<Codec>(work);
  float* const values = shared_values(shared_bytes(tile, work.block_size, false));
  for_each_tile(work, tile, table.total, [&](int64_t first, const Run& run) {
    decode_tile(codec, layout, tile, first, lane, messages, count, values);
    // Scaled here: unflatten_run would scale a float64 tensor in float64.
    order_tile(values, length_of(run), work.scale, lane);
    unflatten_run(table, values - run.begin, 1.0, run, lane);
    __syncwarp();
  });
}

template <typename Codec>
__global__ void __launch_bounds__(kThreads, kDecodeBlocks<Codec>)
    reduce_kernel(const BlockWork work, const uint8_t* messages, int64_t count,
                  const int64_t* rounding, float* error, uint8_t* message) {
  const Codec codec;
  const int lane = lane_of_warp();
  const auto tile = tile_of<Codec>(work.block_size);
  const auto layout = layout_of<Codec>(work);
  const auto key = dither_key<Codec>(rounding, work.block);
  float* const values = shared_values(shared_bytes(tile, work.block_size, key.is_random));
  for_each_tile(work, tile, work.numel, [&](int64_t first, const Run& run) {
    decode_tile(codec, layout, tile, first, lane, messages, count, values);
    encode_tile<true>(codec, layout, tile, first, length_of(run), lane, work.scale, key, values,
                      error, message);
  });
}

// The shape of a launch over the blocks of a chunk, or over `total` of its elements from the tile
// `first` on.
struct BlockGrid {
  BlockWork work;
  unsigned blocks;
  unsigned threads;
  size_t shared;
};

constexpr int64_t kMostTiles = 16;  // of a warp: enough to pay for its first search

template <typename Codec, typename Kernel>
BlockGrid grid_of(Kernel* kernel, const codecs::Chunk& chunk, int64_t first, int64_t total,
                  double scale, bool is_random) {
  const auto& layout = chunk.layout;
  constexpr int kSharedBytes = 48 * 1024;  // every device gives a block this without a request
  const auto size = static_cast<int>(layout.form().block_size);
  const auto tile = tile_of<Codec>(size);
  const int bytes = shared_bytes(tile, size, is_random);
  const int warps = std::clamp(kSharedBytes / bytes, 1, kWarpsPerBlock);
  const int64_t values = values_of(tile, size);
  const int64_t all = (total + values - 1) / values;
  const auto shared = static_cast<size_t>(warps) * static_cast<size_t>(bytes);
  const int64_t tiles =
      std::clamp<int64_t>(all / warps_of_a_wave(kernel, warps * kWarpSize, shared), 1, kMostTiles);
  const int64_t blocks = (all + tiles * warps - 1) / (tiles * warps);
  TORCH_CHECK(blocks <= std::numeric_limits<int>::max(), "block codec: too many elements, ",
              layout.numel());
  return {{layout.numel(), first, chunk.block, static_cast<int>(layout.shards()), size,
           static_cast<int>(tiles), static_cast<float>(scale)},
          static_cast<unsigned>(blocks),
          static_cast<unsigned>(warps * kWarpSize),
          shared};
}

// Whether the whole tiles of a layout stay in registers.
template <typename Codec>
bool uses_registers(const codecs::BlockLayout& layout) {
  return kStaysInRegisters<Codec> && fits_registers(layout.form().block_size) && has_places(layout);
}

// The same for kernels that use registers.
struct RegisterGrid {
  RegisterWork work;
  unsigned blocks;
};

constexpr int kRegisterWarps = kRegisterThreads / kWarpSize;
constexpr size_t kRegisterBytes = kRegisterWarps * kTileBytes;  // of shared memory

template <typename Kernel>
RegisterGrid register_grid(Kernel* kernel, const codecs::Chunk& chunk, int64_t first, int64_t total,
                           double scale, const float* error) {
  const auto& layout = chunk.layout;
  const auto size = static_cast<int>(layout.form().block_size);
  const int lanes = size / (kTileValues / kWarpSize);
  int bits = 0;
  while (1 << bits < lanes) {
    ++bits;
  }
  const int64_t whole = total / kTileValues;
  const int64_t last = (total % kTileValues + size - 1) / size;
  const int64_t wave = warps_of_a_wave(kernel, kRegisterThreads, kRegisterBytes);
  const int64_t tiles = std::clamp<int64_t>(whole / wave, 1, kMostTiles);
  const int64_t warps = last + (whole + tiles - 1) / tiles;
  const int64_t blocks = (warps + kRegisterWarps - 1) / kRegisterWarps;
  return {{places_of(layout), layout.numel(), chunk.block,
           static_cast<uint32_t>(first * (kTileValues / size)), size, lanes, bits,
           static_cast<int>(tiles), static_cast<uint32_t>(last), static_cast<float>(scale),
           is_aligned_for_quads(error)},
          static_cast<unsigned>(blocks)};
}

// Calls call(random, error) with two flags as compile-time constants.
template <typename Codec, typename Call>
void with_flags(bool is_random, bool has_error, const Call& call) {
  const auto with_error = [&](auto random) {
    has_error ? call(random, std::true_type{}) : call(random, std::false_type{});
  };
  if constexpr (Codec::kIsRandom) {
    if (is_random) {
      return with_error(std::true_type{});
    }
  }
  with_error(std::false_type{});
}

template <typename Codec>
int64_t tile_values(const codecs::BlockLayout& layout) {
  const auto size = static_cast<int>(layout.form().block_size);
  return uses_registers<Codec>(layout) ? kTileValues : values_of(tile_of<Codec>(size), size);
}

// The segments with a chunk's elements, cut at the chunk's ends.
template <typename Data>
std::vector<Segment<Data>> part_of(c10::ArrayRef<Segment<Data>> segments,
                                   const codecs::Chunk& chunk) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  std::vector<Segment<Data>> part;
  int64_t start = 0;
  for (const auto& whole : segments) {
    const int64_t from = std::max(chunk.element, start);
    const int64_t to = std::min(chunk.end(), start + whole.numel);
    if (from < to) {
      auto* const data = static_cast<Byte*>(whole.data) + (from - start) * bytes_of(whole.dtype);
      part.push_back({data, to - from, whole.dtype});
    }
    start += whole.numel;
  }
  return part;
}

// Calls launch(chunk, table, first tile) for each table of each chunk that has values.
template <typename Codec, typename Data, typename Launch>
void with_tables_of_chunks(c10::ArrayRef<Segment<Data>> segments, const codecs::Chunks& chunks,
                           const at::TensorOptions& options, const Launch& launch) {
  for (const auto& chunk : chunks) {
    if (chunk.layout.blocks() > 0) {
      const auto part = part_of(segments, chunk);
      with_tables(c10::ArrayRef<Segment<Data>>(part), tile_values<Codec>(chunk.layout), options,
                  [&](const auto& table, int64_t first) { launch(chunk, table, first); });
    }
  }
}

// Launches the encoding of one table of a chunk. error: the chunk's, or null.
template <typename Codec, int kCapacity>
void launch_encode(const codecs::Chunk& chunk, const TensorTable<const void, kCapacity>& table,
                   int64_t first, double scale, const int64_t* rounding, float* error,
                   uint8_t* message) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if constexpr (kStaysInRegisters<Codec>) {
    if (uses_registers<Codec>(chunk.layout)) {
      return with_flags<Codec>(rounding != nullptr, error != nullptr, [&](auto random, auto has) {
        constexpr bool kRandom = decltype(random)::value;
        constexpr bool kError = decltype(has)::value;
        const auto grid = register_grid(register_encode_kernel<Codec, kRandom, kError, kCapacity>,
                                        chunk, first, table.total, scale, error);
        register_encode_kernel<Codec, kRandom, kError, kCapacity>
            <<<grid.blocks, kRegisterThreads, kRegisterBytes, stream>>>(table, grid.work, rounding,
                                                                        error, message);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      });
    }
  }
  const auto grid = grid_of<Codec>(encode_kernel<Codec, kCapacity>, chunk, first, table.total,
                                   scale, rounding != nullptr);
  encode_kernel<Codec, kCapacity><<<grid.blocks, grid.threads, grid.shared, stream>>>(
      table, grid.work, rounding, error, message);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// message: checked, with the layout of `chunks`. Each chunk has its own launches.
template <typename Codec>
void encode_blocks(const char* op, at::TensorList tensors, const at::Tensor& message,
                   const codecs::Chunks& chunks, double scale,
                   const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding) {
  const c10::cuda::CUDAGuard guard(message.device());
  const Sources sources(op, tensors);
  const auto* const seed = numbers_of(op, "rounding", rounding);
  const WideError wide(op, error);
  auto* const lost = wide.data();
  auto* const bytes = message.mutable_data_ptr<uint8_t>();
  with_tables_of_chunks<Codec>(sources.segments(), chunks, message.options(),
                               [&](const codecs::Chunk& chunk, const auto& table, int64_t first) {
                                 launch_encode<Codec>(
                                     chunk, table, first, scale, seed,
                                     lost == nullptr ? nullptr : lost + chunk.element,
                                     bytes + chunk.offset);
                               });
  wide.finish();
}

// Launches the decoding of one table of a chunk. is_sum: whether there may be several messages, and
// a scale.
template <typename Codec, int kCapacity>
void launch_decode(const codecs::Chunk& chunk, const TensorTable<void, kCapacity>& table,
                   int64_t first, double scale, const uint8_t* messages, int64_t count,
                   bool is_sum) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if constexpr (kStaysInRegisters<Codec>) {
    if (uses_registers<Codec>(chunk.layout)) {
      const auto with = [&](auto many) {
        constexpr bool kMany = decltype(many)::value;
        const auto grid = register_grid(register_decode_kernel<Codec, kMany, kCapacity>, chunk,
                                        first, table.total, scale, nullptr);
        register_decode_kernel<Codec, kMany, kCapacity>
            <<<grid.blocks, kRegisterThreads, kRegisterBytes, stream>>>(
                table, grid.work, messages, count, chunk.layout.bytes());
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      };
      return is_sum ? with(std::true_type{}) : with(std::false_type{});
    }
  }
  const auto grid =
      grid_of<Codec>(decode_kernel<Codec, kCapacity>, chunk, first, table.total, scale, false);
  decode_kernel<Codec, kCapacity>
      <<<grid.blocks, grid.threads, grid.shared, stream>>>(table, grid.work, messages, count);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// Only a single chunk may have several messages.
template <typename Codec>
void decode_messages(const char* op, const at::Tensor& messages, int64_t count,
                     at::TensorList tensors, const codecs::Chunks& chunks, double scale,
                     bool is_sum) {
  const c10::cuda::CUDAGuard guard(messages.device());
  const Destinations destinations(op, tensors);
  const auto* const bytes = messages.const_data_ptr<uint8_t>();
  with_tables_of_chunks<Codec>(destinations.segments(), chunks, messages.options(),
                               [&](const codecs::Chunk& chunk, const auto& table, int64_t first) {
                                 launch_decode<Codec>(chunk, table, first, scale,
                                                      bytes + chunk.offset, count, is_sum);
                               });
  destinations.finish();
}

template <typename Codec>
void decode_blocks(const char* op, const at::Tensor& message, at::TensorList tensors,
                   const codecs::Chunks& chunks) {
  decode_messages<Codec>(op, message, 1, tensors, chunks, 1.0, false);
}

template <typename Codec>
void decode_sum_blocks(const char* op, const at::Tensor& messages, at::TensorList tensors,
                       const codecs::BlockLayout& layout, double scale) {
  decode_messages<Codec>(op, messages, messages.size(0), tensors,
                         {layout.form(), layout.numel(), layout.shards()}, scale, true);
}

template <typename Codec>
void reduce_blocks(const char* op, const at::Tensor& messages, const at::Tensor& message,
                   const codecs::BlockLayout& layout, double scale,
                   const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding) {
  if (layout.blocks() == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(message.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto* const seed = numbers_of(op, "rounding", rounding);
  const WideError lost(op, error);
  const auto* const from = messages.const_data_ptr<uint8_t>();
  auto* const to = message.mutable_data_ptr<uint8_t>();
  const codecs::Chunk whole{layout, 0, 0, 0};
  bool is_done = false;
  if constexpr (kStaysInRegisters<Codec>) {
    is_done = uses_registers<Codec>(layout);
    if (is_done) {
      with_flags<Codec>(seed != nullptr, lost.data() != nullptr, [&](auto random, auto has) {
        constexpr bool kRandom = decltype(random)::value;
        constexpr bool kError = decltype(has)::value;
        const auto grid = register_grid(register_reduce_kernel<Codec, kRandom, kError>, whole, 0,
                                        layout.numel(), scale, lost.data());
        register_reduce_kernel<Codec, kRandom, kError>
            <<<grid.blocks, kRegisterThreads, kRegisterBytes, stream>>>(
                grid.work, from, messages.size(0), layout.bytes(), seed, lost.data(), to);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      });
    }
  }
  if (!is_done) {
    const auto grid =
        grid_of<Codec>(reduce_kernel<Codec>, whole, 0, layout.numel(), scale, seed != nullptr);
    reduce_kernel<Codec><<<grid.blocks, grid.threads, grid.shared, stream>>>(
        grid.work, from, messages.size(0), seed, lost.data(), to);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  lost.finish();
}

}  // namespace commhook::cuda
