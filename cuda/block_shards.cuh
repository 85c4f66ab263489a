// Sums shards that ranks share, and writes the message of the sum, in one kernel. It works like
// reduce_kernel, with messages at any addresses, also in the memory of other devices.
#pragma once

#include "block_codec.cuh"
#include "ops/symmetric/symmetric.h"

namespace commhook::cuda {

// The ranks' messages, in order.
struct ShardTable {
  const uint8_t* messages[symmetric::kMaxRanks];
  int64_t count;
  bool is_aligned_alike;

  COMMHOOK_HOST_DEVICE const uint8_t* at(int64_t m) const { return messages[m]; }
  COMMHOOK_HOST_DEVICE bool are_aligned_alike() const { return is_aligned_alike; }
};

inline ShardTable shard_table(at::TensorList messages) {
  ShardTable table{{}, static_cast<int64_t>(messages.size()), true};
  const auto past = [](const uint8_t* data) {
    return reinterpret_cast<uintptr_t>(data) % kQuadBytes;
  };
  for (size_t i = 0; i < messages.size(); ++i) {
    table.messages[i] = messages[i].const_data_ptr<uint8_t>();
    table.is_aligned_alike =
        table.is_aligned_alike && past(table.messages[i]) == past(table.messages[0]);
  }
  return table;
}

// failed: null, or a number; if it is not zero, the kernel reads and writes nothing.
template <typename Codec>
__global__ void __launch_bounds__(kThreads, Codec::kBits == 8 ? 2 : 1)
    reduce_shards_kernel(const __grid_constant__ ShardTable shards, const BlockWork work,
                         const int64_t* failed, const int64_t* rounding, float* error,
                         uint8_t* message) {
  const Codec codec;
  const int lane = lane_of_warp();
  const auto tile = tile_of<Codec>(work.block_size);
  const auto layout = layout_of<Codec>(work);
  if (failed != nullptr && *failed != 0) {
    return;  // other ranks may still be reading the previous sum
  }
  const auto key = dither_key<Codec>(rounding, work.block);
  float* const values = shared_values(shared_bytes(tile, work.block_size, key.is_random));
  for_each_tile(work, tile, work.numel, [&](int64_t first, const Run& run) {
    decode_tile(codec, layout, tile, first, lane, shards, values);
    encode_tile<true>(codec, layout, tile, first, length_of(run), lane, work.scale, key, values,
                      error, message);
  });
}

template <typename Codec>
void reduce_shards(const char* op, at::TensorList messages, const at::Tensor& message,
                   const codecs::BlockLayout& layout, double scale,
                   const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding,
                   const std::optional<at::Tensor>& failed) {
  if (layout.blocks() == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(message.device());
  const auto shards = shard_table(messages);
  const auto* const failure = numbers_of(op, "failed", failed);
  const auto* const seed = numbers_of(op, "rounding", rounding);
  const WideError lost(op, error);
  const codecs::Chunk whole{layout, 0, 0, 0};
  const auto grid =
      grid_of<Codec>(reduce_shards_kernel<Codec>, whole, 0, layout.numel(), scale, seed != nullptr);
  reduce_shards_kernel<Codec>
      <<<grid.blocks, grid.threads, grid.shared, c10::cuda::getCurrentCUDAStream()>>>(
          shards, grid.work, failure, seed, lost.data(), message.mutable_data_ptr<uint8_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  lost.finish();
}

}  // namespace commhook::cuda
