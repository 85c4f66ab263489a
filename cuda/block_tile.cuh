// How a warp encodes and decodes blocks, for all codecs that send values in blocks.
//
// A codec says what is its own:
//   kBits, kParameters  of a value's code and of a block
//   kIsRandom           whether it can round with random numbers
//   Measure             accumulates a block's values; each word is max-reduced across its lanes
//   kSums               whether that is a SumOfMagnitudes instead
//   quantizer(measure, count, parameters, result)
//                       gives a Quantizer and the parameters; false where a value is infinite or
//                       NaN
//   code(value, dither, is random, quantizer, restored)
//   restorer(parameters)
//                       a function of codes
#pragma once

#include "block_codes.h"
#include "ops/codecs/block_layout.h"
#include "partition.h"
#include "warp.cuh"

namespace commhook::cuda {

// The lanes of a warp share out its blocks: so many lanes to a block, a power of two, each of which
// then has codes of 16 bytes to move at once, or words of four.
struct BlockTile {
  int lanes;
  int blocks;  // of the warp at once
};

// Whether the codes of whole blocks are moved 16 bytes at once. Of a single bit that would be so
// many values that few warps have room for them.
template <typename Codec>
COMMHOOK_HOST_DEVICE bool has_quads(int block_size) {
  return Codec::kBits >= 4 && block_size * Codec::kBits % (8 * kQuadBytes) == 0;
}

template <typename Codec>
COMMHOOK_HOST_DEVICE BlockTile tile_of(int block_size) {
  const int pieces =
      block_size * Codec::kBits / 8 / (has_quads<Codec>(block_size) ? kQuadBytes : 4);
  int lanes = 1;
  while (lanes < pieces && lanes < kWarpSize) {
    lanes *= 2;
  }
  return {lanes, kWarpSize / lanes};
}

COMMHOOK_HOST_DEVICE BlockLane block_lane(const BlockTile& tile, int lane) {
  return {lane % tile.lanes, tile.lanes, lane / 2 % kQuadWords};
}

// Of one launch.
struct BlockWork {
  int64_t numel;  // of all launches
  int64_t first;  // tile
  int64_t block;  // of all messages, with which this one begins
  int shards;
  int block_size;
  int tiles;  // of a warp, one after the other
  float scale;
};

template <typename Codec>
COMMHOOK_HOST_DEVICE codecs::BlockLayout layout_of(const BlockWork& work) {
  return {{work.block_size, Codec::kBits, Codec::kParameters}, work.numel, work.shards};
}

// The values of a warp's tiles: the first of them, and the number of those in one tile.
COMMHOOK_HOST_DEVICE int values_of(const BlockTile& tile, int block_size) {
  return tile.blocks * block_size;
}

// Bytes of shared memory for a warp: a tile's values, and their random numbers.
COMMHOOK_HOST_DEVICE int shared_bytes(const BlockTile& tile, int block_size, bool is_random) {
  const int values = values_of(tile, block_size);
  const int bytes = values * static_cast<int>(sizeof(float)) +
                    (is_random ? (values + 8) * static_cast<int>(sizeof(uint16_t)) : 0);
  return (bytes + 15) / 16 * 16;
}

// A block of a tile, and where its message is.
struct BlockPlace {
  int64_t block;
  int64_t begin;  // element
  int count;      // of elements; 0 past the last block
  int64_t codes;  // bytes of the message
  int64_t parameters;
};

template <typename Codec>
COMMHOOK_HOST_DEVICE BlockPlace place_of(const codecs::BlockLayout& layout, int64_t block) {
  if (block >= layout.blocks()) {
    return {block, layout.numel(), 0, 0, 0};
  }
  const int64_t size = layout.form().block_size;
  const int64_t begin = block * size;
  const int64_t left = layout.numel() - begin;
  const int64_t shard = layout.shards() == 1 ? 0 : layout.shard_of_block(block);
  const int64_t before = block - layout.first_block(shard);
  const int64_t offset = layout.offset_of_shard(shard);
  return {block, begin, static_cast<int>(left < size ? left : size),
          offset + before * layout.form().code_bytes(size),
          offset + layout.offset_of_parameters(shard) +
              before * Codec::kParameters * static_cast<int64_t>(sizeof(float))};
}

// Of the sums of magnitudes of a tile's blocks, in `values`, the one of this lane's block.
template <typename Codec, bool kLowered>
__device__ float sum_of_magnitudes(const codecs::BlockLayout& layout, const BlockTile& tile,
                                   int64_t first, int lane, const float* values) {
  constexpr int kBlocks = kWarpSize / kSumParts;  // at once
  const int64_t begin = first * layout.form().block_size;
  float sum = 0.0f;
  for (int b = 0; b < tile.blocks; b += kBlocks) {
    // Of a tile's only block the second half of the warp has nothing.
    const int block = b + lane / kSumParts;
    const auto place = place_of<Codec>(layout, first + block);
    float part = sum_of_part<kLowered>(values + (place.begin - begin),
                                       block < tile.blocks ? place.count : 0, lane % kSumParts);
#pragma unroll
    for (int distance = kSumParts / 2; distance > 0; distance /= 2) {
      part += __shfl_xor_sync(kWholeWarp, part, distance);
    }
    const int own = lane / tile.lanes;
    part = __shfl_sync(kWholeWarp, part, own % kBlocks * kSumParts);
    if (own / kBlocks * kBlocks == b) {
      sum = part;
    }
  }
  return sum;
}

// Encodes a tile's values, which lie in `values`, beginning with those of block `first`.
template <typename Codec>
__device__ void encode_tile(const Codec& codec, const codecs::BlockLayout& layout,
                            const BlockTile& tile, int64_t first, int lane, float scale,
                            const DitherKey& key, float* values, float* error, uint8_t* message) {
  const auto size = static_cast<int>(layout.form().block_size);
  const auto among = block_lane(tile, lane);
  const auto own = place_of<Codec>(layout, first + lane / tile.lanes);
  const int64_t offset = own.begin - first * size;
  float* const p = values + offset;
  float* const own_error = error == nullptr ? nullptr : error + own.begin;
  auto* const dithers = reinterpret_cast<uint16_t*>(values + values_of(tile, size)) + offset;
  const bool is_random = Codec::kIsRandom && key.is_random;
  typename Codec::Measure measure;
  compensate(p, own.count, scale, own_error, among, [&](float value) { measure.add(value); });
  if (is_random) {
    draw_dithers(key, key.block + own.block, own.count, dithers, among);
  }
  __syncwarp();
  if constexpr (Codec::kSums) {
    measure.sum = sum_of_magnitudes<Codec, false>(layout, tile, first, lane, values);
    const bool is_infinite = bits_of(measure.sum) >= kInfinity;
    if (__any_sync(kWholeWarp, is_infinite)) {
      const float lowered = sum_of_magnitudes<Codec, true>(layout, tile, first, lane, values);
      measure = is_infinite ? SumOfMagnitudes{lowered, true} : measure;
    }
    __syncwarp();  // before what is lost takes the place of values that others have read
  } else {
    take_largest(tile.lanes, measure);
  }
  bool writes_lost = false;
  if (own.count > 0) {
    uint8_t* const codes = message + own.codes;
    float parameters[Codec::kParameters];
    typename Codec::Quantizer quantizer;
    if (codec.quantizer(measure, own.count, parameters, quantizer)) {
      writes_lost = error != nullptr;
      write_codes(codec, p, is_random ? dithers : nullptr, own.count, quantizer, writes_lost, codes,
                  among);
    } else {  // with the error as it was
      write_zeros(codes, width_of<Codec>(own.count), among);
      for (float& parameter : parameters) {
        parameter = float_of(kNaN);
      }
    }
    if (among.index == 0) {
      for (int i = 0; i < Codec::kParameters; ++i) {
        reinterpret_cast<float*>(message + own.parameters)[i] = parameters[i];
      }
    }
    const int64_t shard = layout.shards() == 1 ? 0 : layout.shard_of_block(own.block);
    if (own.block + 1 == layout.first_block(shard + 1)) {
      const auto codes_end = layout.fill_of_codes(shard);
      const auto shard_end = layout.fill_of_parameters(shard);
      write_zeros(message + codes_end.begin, codes_end.end - codes_end.begin, among);
      write_zeros(message + shard_end.begin, shard_end.end - shard_end.begin, among);
    }
  }
  __syncwarp();
  if (error != nullptr) {
    if (writes_lost) {
      write_lost(p, own.count, own_error, among);
    }
    __syncwarp();
  }
}

// Writes a tile's values into `values`: the sums of those of all messages, of the same layout.
template <typename Codec, typename Messages>
__device__ void decode_tile(const Codec& codec, const codecs::BlockLayout& layout,
                            const BlockTile& tile, int64_t first, int lane,
                            const Messages& messages, float* values) {
  const auto own = place_of<Codec>(layout, first + lane / tile.lanes);
  if (own.count > 0) {
    read_codes(codec, messages, own.codes, own.parameters, own.count,
               values + (own.begin - first * layout.form().block_size), block_lane(tile, lane));
  }
  __syncwarp();
}

// The same, of `messages` messages that follow one another.
template <typename Codec>
__device__ void decode_tile(const Codec& codec, const codecs::BlockLayout& layout,
                            const BlockTile& tile, int64_t first, int lane, const uint8_t* message,
                            int64_t messages, float* values) {
  decode_tile(codec, layout, tile, first, lane, MessageRows{message, messages, layout.bytes()},
              values);
}

}  // namespace commhook::cuda
