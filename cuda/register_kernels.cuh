// The kernels that keep values in registers (register_tile.cuh), and the work on tiles that
// registers cannot load or store.
#pragma once

#include "register_tile.cuh"
#include "rounding.cuh"
#include "row.h"

namespace commhook::cuda {

// Threads of a block: few, since each needs many registers.
constexpr int kRegisterThreads = 128;

// The minimum number of blocks in a multiprocessor for kernels that encode. On sm_100 the compiler
// would otherwise use registers for fewer blocks. A fitted step together with an error needs a few
// more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
template <typename Codec, bool kRandom, bool kError>
constexpr int kEncodeBlocks = kRandom         ? 4
                              : !Codec::kFits ? (kError ? 4 : 5)
                                              : (kError ? 3 : 4);
#else
template <typename Codec, bool kRandom, bool kError>
constexpr int kEncodeBlocks = 4;
#endif

// The place of a tile's values if they are aligned float32 in a single tensor. Data: the table's.
template <typename Data>
struct RowCursor {
  Data* data = nullptr;  // of the tensor; null if its values cannot be moved as vectors
  int64_t start = 0;     // the tensor's position in the table
  int64_t end = 0;

  // begin: a multiple of a tile's values, never before an earlier one.
  template <typename Table>
  COMMHOOK_HOST_DEVICE bool find(const Table& table, int64_t begin) {
    if (begin >= end) {
      const int tensor = find_tensor(table, begin);
      start = tensor == 0 ? 0 : table.entries[tensor - 1].end;
      end = table.entries[tensor].end;
      data = table.entries[tensor].data;
      const auto first = reinterpret_cast<uintptr_t>(data) / sizeof(float);
      if (table.dtypes[tensor] != Dtype::kFloat ||
          (first - static_cast<uintptr_t>(start)) % kQuadValues != 0) {
        data = nullptr;
      }
    }
    return data != nullptr && begin + kTileValues <= end;
  }
  COMMHOOK_HOST_DEVICE auto* at(int64_t position) const {
    using Float = std::conditional_t<std::is_const_v<Data>, const float, float>;
    return static_cast<Float*>(data) + (position - start);
  }
};

// The place of a lane's block; it advances from tile to tile.
template <typename Codec>
struct LanePlace {
  static constexpr int kParameterBytes = Codec::kParameters * static_cast<int>(sizeof(float));
  uint32_t block;
  PlaceInShard place = {0, 0, 0};

  COMMHOOK_HOST_DEVICE void find(const RegisterWork& work) {
    if (block >= place.end) {
      place = place_in_shard(work.places, block, code_bytes(work), kParameterBytes);
    }
  }
  COMMHOOK_HOST_DEVICE void move_on(const RegisterWork& work) {
    const int blocks = kWarpSize >> work.lane_bits;
    block += static_cast<uint32_t>(blocks);
    place.codes += blocks * code_bytes(work);
    place.parameters += blocks * kParameterBytes;
  }
  COMMHOOK_HOST_DEVICE static int code_bytes(const RegisterWork& work) {
    return work.block_size * Codec::kBits / 8;
  }
};

// The index of this thread's warp in the launch.
__device__ inline uint32_t warp_of_launch() {
  return blockIdx.x * (blockDim.x / kWarpSize) + static_cast<uint32_t>(warp_of_block());
}

COMMHOOK_HOST_DEVICE uint32_t blocks_of_tile(const RegisterWork& work) {
  return static_cast<uint32_t>(kWarpSize >> work.lane_bits);
}

// Calls whole(begin, position) for the full tiles of this thread's warp, or rest(block, run,
// position) for one of the blocks that fill no tile. begin counts from the first of the launch's
// `total` values, position from the message's first value. Blocks that fill no tile run in plain
// loops, which are slow. So the first warps take these blocks, while the other warps take the
// tiles.
template <typename Whole, typename Rest>
__device__ void for_each_register_tile(const RegisterWork& work, int64_t total, const Whole& whole,
                                       const Rest& rest) {
  const uint32_t warp = warp_of_launch();
  const int64_t first = int64_t{work.first} * work.block_size;
  if (warp < work.last_blocks) {
    const auto before = static_cast<uint32_t>(total / kTileValues) * blocks_of_tile(work) + warp;
    const int64_t begin = int64_t{before} * work.block_size;
    rest(work.first + before, Run{begin, min(total, begin + work.block_size)}, first + begin);
    return;
  }
  int64_t begin = int64_t{warp - work.last_blocks} * work.tiles * kTileValues;
#pragma unroll 1
  for (int i = 0; i < work.tiles && begin + kTileValues <= total; ++i, begin += kTileValues) {
    whole(begin, first + begin);
  }
}

// The place of a lane's block in the first tile. Only for a warp that has tiles.
template <typename Codec>
__device__ LanePlace<Codec> first_place(const RegisterWork& work, int lane) {
  const uint32_t tile = (warp_of_launch() - work.last_blocks) * static_cast<uint32_t>(work.tiles);
  return {work.first + tile * blocks_of_tile(work) + static_cast<uint32_t>(lane >> work.lane_bits)};
}

template <typename Codec>
__device__ PlaceInShard place_of_block(const RegisterWork& work, uint32_t block) {
  return place_in_shard(work.places, block, LanePlace<Codec>::code_bytes(work),
                        LanePlace<Codec>::kParameterBytes);
}

COMMHOOK_HOST_DEVICE int length_of(const Run& run) { return static_cast<int>(run.end - run.begin); }

// Zeroes a shard's padding, after the codes and after the parameters of its last block. code_bytes,
// parameter_bytes: of that block.
__device__ inline void fill_shard(const ShardPlaces& places, uint32_t block,
                                  const PlaceInShard& place, int code_bytes, int parameter_bytes,
                                  uint8_t* message, int lane, int lanes) {
  const auto shard = shard_of_block(places, block);
#pragma unroll 1
  for (int64_t i = place.codes + code_bytes + lane; i < shard.parameters; i += lanes) {
    message[i] = 0;
  }
#pragma unroll 1
  for (int64_t i = place.parameters + parameter_bytes + lane; i < shard.bytes_end; i += lanes) {
    message[i] = 0;
  }
}

// block: the first block of this message, counted over all messages.
__device__ inline DitherKey key_of(const int64_t* rounding, int64_t block) {
  const auto seed = seed_of(rounding);
  return {true, seed.low, seed.high, seed.step, block};
}

// Computes p = value * scale + error for a lane's values.
template <bool kError>
__device__ void compensate_quads(const RegisterWork& work, int step, const float* error,
                                 Quad (&quads)[kEighths]) {
#pragma unroll
  for (Quad& quad : quads) {
#pragma unroll
    for (float& value : quad.values) {
      value = value * work.scale;
    }
  }
  if constexpr (kError) {
    Quad lost[kEighths];
    load_quads(error, step, work.is_aligned, lost);
#pragma unroll
    for (int k = 0; k < kEighths; ++k) {
#pragma unroll
      for (int j = 0; j < kQuadValues; ++j) {
        quads[k].values[j] = quads[k].values[j] + lost[k].values[j];
      }
    }
  }
}

// Encodes the values of a full tile. They are in `quads`, without the error.
template <typename Codec, bool kRandom, bool kError>
__device__ void encode_full_tile(const RegisterWork& work, const LaneInTile& at, int lane,
                                 const DitherKey& key, LanePlace<Codec>& own, int64_t position,
                                 Quad (&quads)[kEighths], float* error, uint8_t* message) {
  own.find(work);
  float* const own_error = kError ? error + position + at.first : nullptr;
  compensate_quads<kError>(work, at.step, own_error, quads);
  const bool is_sent = encode_quads<Codec, kRandom>(
      Codec(), work, at, lane, key, own.block, quads, message + own.place.codes,
      reinterpret_cast<float*>(message + own.place.parameters));
  if (kError && is_sent) {
    store_quads<false>(quads, own_error, at.step, work.is_aligned);
  }
  if (own.block + 1 == own.place.end) {
    fill_shard(work.places, own.block, own.place, own.code_bytes(work), own.kParameterBytes,
               message, at.index, work.lanes);
  }
  own.move_on(work);
}

// Encodes a block of `count` values in shared memory. position: of its first value.
template <typename Codec, bool kRandom, bool kError>
__device__ void encode_last_block(const RegisterWork& work, int lane, const DitherKey& key,
                                  uint32_t block, int64_t position, int count, float* values,
                                  float* error, uint8_t* message) {
  const auto place = place_of_block<Codec>(work, block);
  encode_block<Codec, kRandom>(Codec(), count, work.scale, key, key.block + block, values,
                               kError ? error + position : nullptr, message + place.codes,
                               reinterpret_cast<float*>(message + place.parameters), lane);
  if (block + 1 == place.end) {
    fill_shard(work.places, block, place, width_of<Codec>(count), LanePlace<Codec>::kParameterBytes,
               message, lane, kWarpSize);
  }
}

// Decodes a block of `length` values into shared memory.
template <typename Codec>
__device__ void decode_last_block(const Codec& codec, const RegisterWork& work, uint32_t block,
                                  int length, const uint8_t* messages, int64_t count,
                                  int64_t stride, float* values, int lane) {
  const auto place = place_of_block<Codec>(work, block);
  decode_block(codec, length, messages + place.codes,
               reinterpret_cast<const float*>(messages + place.parameters), count, stride, values,
               lane);
}

template <typename Codec, bool kRandom, bool kError, int kCapacity>
__global__ void __launch_bounds__(kRegisterThreads, kEncodeBlocks<Codec, kRandom, kError>)
    register_encode_kernel(const __grid_constant__ TensorTable<const void, kCapacity> table,
                           const __grid_constant__ RegisterWork work, const int64_t* rounding,
                           float* error, uint8_t* message) {
  const int lane = lane_of_warp();
  const auto at = lane_in_tile(work, lane);
  const auto key = kRandom ? key_of(rounding, work.block) : DitherKey{};
  float* const shared = shared_values(kTileBytes);
  RowCursor<const void> cursor;
  auto own = first_place<Codec>(work, lane);
  NoMeasure meter;
  for_each_register_tile(
      work, table.total,
      [&](int64_t begin, int64_t position) {
        Quad quads[kEighths];
        if (cursor.find(table, begin)) {
          load_quads(cursor.at(begin + at.first), at.step, true, quads);
        } else {
          flatten_run(table, shared - begin, 1.0, {begin, begin + kTileValues}, lane, meter);
          __syncwarp();
          load_quads(shared + at.first, at.step, true, quads);
          __syncwarp();
        }
        encode_full_tile<Codec, kRandom, kError>(work, at, lane, key, own, position, quads, error,
                                                 message);
      },
      [&](uint32_t block, const Run& run, int64_t position) {
        flatten_run(table, shared - run.begin, 1.0, run, lane, meter);
        __syncwarp();
        encode_last_block<Codec, kRandom, kError>(work, lane, key, block, position, length_of(run),
                                                  shared, error, message);
      });
}

template <typename Codec, bool kMany, int kCapacity>
__global__ void __launch_bounds__(kRegisterThreads, kMany ? 4 : 6)
    register_decode_kernel(const __grid_constant__ TensorTable<void, kCapacity> table,
                           const __grid_constant__ RegisterWork work, const uint8_t* messages,
                           int64_t count, int64_t stride) {
  const Codec codec;
  const int lane = lane_of_warp();
  const auto at = lane_in_tile(work, lane);
  float* const shared = shared_values(kTileBytes);
  RowCursor<void> cursor;
  auto own = first_place<Codec>(work, lane);
  for_each_register_tile(
      work, table.total,
      [&](int64_t begin, int64_t) {
        own.find(work);
        Quad quads[kEighths];
        decode_quads<Codec, kMany>(codec, at, lane, messages + own.place.codes,
                                   reinterpret_cast<const float*>(messages + own.place.parameters),
                                   count, stride, quads);
        own.move_on(work);
        if constexpr (kMany) {
#pragma unroll
          for (Quad& quad : quads) {
#pragma unroll
            for (float& value : quad.values) {
              value = value * work.scale;
            }
          }
        }
        if (cursor.find(table, begin)) {
          store_quads<false>(quads, cursor.at(begin + at.first), at.step, true);
        } else {
          store_quads<true>(quads, shared + at.first, at.step, true);
          __syncwarp();
          unflatten_run(table, shared - begin, 1.0, {begin, begin + kTileValues}, lane);
          __syncwarp();
        }
      },
      [&](uint32_t block, const Run& run, int64_t) {
        decode_last_block(codec, work, block, length_of(run), messages, count, stride, shared,
                          lane);
        if (kMany) {
#pragma unroll 1
          for (int i = lane; i < length_of(run); i += kWarpSize) {
            shared[i] *= work.scale;  // this lane has decoded it
          }
        }
        __syncwarp();
        unflatten_run(table, shared - run.begin, 1.0, run, lane);
      });
}

template <typename Codec, bool kRandom, bool kError>
__global__ void __launch_bounds__(kRegisterThreads, 4)
    register_reduce_kernel(const __grid_constant__ RegisterWork work, const uint8_t* messages,
                           int64_t count, int64_t stride, const int64_t* rounding, float* error,
                           uint8_t* message) {
  const Codec codec;
  const int lane = lane_of_warp();
  const auto at = lane_in_tile(work, lane);
  const auto key = kRandom ? key_of(rounding, work.block) : DitherKey{};
  float* const shared = shared_values(kTileBytes);
  auto own = first_place<Codec>(work, lane);
  for_each_register_tile(
      work, work.numel,
      [&](int64_t, int64_t position) {
        own.find(work);
        Quad quads[kEighths];
        decode_quads<Codec, true>(codec, at, lane, messages + own.place.codes,
                                  reinterpret_cast<const float*>(messages + own.place.parameters),
                                  count, stride, quads);
        encode_full_tile<Codec, kRandom, kError>(work, at, lane, key, own, position, quads, error,
                                                 message);
      },
      [&](uint32_t block, const Run& run, int64_t position) {
        decode_last_block(codec, work, block, length_of(run), messages, count, stride, shared,
                          lane);
        // Needs no barrier: each lane compensates the values that it has decoded.
        encode_last_block<Codec, kRandom, kError>(work, lane, key, block, position, length_of(run),
                                                  shared, error, message);
      });
}

}  // namespace commhook::cuda
