// The encoding and decoding of blocks by a warp, for all codecs that send values in blocks.
//
// A codec defines:
//   kBits, kParameters  of a value's code and of a block
//   kIsRandom           whether it can round with random numbers
//   Measure             accumulates a block's values; each word is max-reduced across its lanes
//   kSums               whether Measure is a SumOfMagnitudes instead
//   kFits               whether the step without random rounding comes from block_fit.cuh
//   quantizer(measure, count, parameters, result)
//                       writes a Quantizer and the parameters; returns false if a value is infinite
//                       or NaN
//   code(value, dither, is random, quantizer, restored)
//   restorer(parameters)
//                       a function that restores values from codes
#pragma once

#include "block_codes.h"
#include "block_fit.cuh"
#include "ops/codecs/block_layout.h"
#include "partition.h"
#include "warp.cuh"

namespace commhook::cuda {

// The lanes of a warp share its blocks: each block has a power of two of lanes. Each lane then
// moves codes of 16 bytes at once, or words of four.
struct BlockTile {
  int lanes;
  int blocks;  // of the warp at once
};

// Whether codes of whole blocks are moved 16 bytes at once. With one bit these are so many values
// that shared memory would hold few warps.
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
  return {lane % tile.lanes, tile.lanes};
}

// The values of a lane's block, in a tile's `values`.
COMMHOOK_HOST_DEVICE SpreadValues block_values(const BlockTile& tile, int block_size, int lane,
                                               float* values) {
  return {values, lane / tile.lanes * (block_size / kQuadValues)};
}

// The work of one launch.
struct BlockWork {
  int64_t numel;  // values of all launches
  int64_t first;  // the first tile
  int64_t block;  // the first block of this message, counted over all messages
  int shards;
  int block_size;
  int tiles;  // of a warp, one after the other
  float scale;
};

template <typename Codec>
COMMHOOK_HOST_DEVICE codecs::BlockLayout layout_of(const BlockWork& work) {
  return {{work.block_size, Codec::kBits, Codec::kParameters}, work.numel, work.shards};
}

// The number of values in a tile.
COMMHOOK_HOST_DEVICE int values_of(const BlockTile& tile, int block_size) {
  return tile.blocks * block_size;
}

// The bytes of shared memory for a warp: a tile's values, and their random numbers.
COMMHOOK_HOST_DEVICE int value_bytes(const BlockTile& tile, int block_size) {
  return spread_bytes(values_of(tile, block_size) / kQuadValues);
}

COMMHOOK_HOST_DEVICE int shared_bytes(const BlockTile& tile, int block_size, bool is_random) {
  return value_bytes(tile, block_size) +
         (is_random ? spread_bytes(tile.blocks * counters_of(block_size) + kQuadWords - 1) : 0);
}

// A block of a tile, and its place in the message.
struct BlockPlace {
  int64_t block;
  int64_t begin;  // element
  int count;      // of elements; 0 for blocks past the last
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

// Sums the magnitudes of each block in `values`; returns the sum of this lane's block.
template <typename Codec, bool kLowered>
__device__ float sum_of_magnitudes(const codecs::BlockLayout& layout, const BlockTile& tile,
                                   int64_t first, int lane, float* values) {
  constexpr int kBlocks = kWarpSize / kSumParts;  // summed at once
  const auto quads = static_cast<int>(layout.form().block_size) / kQuadValues;
  float sum = 0.0f;
  for (int b = 0; b < tile.blocks; b += kBlocks) {
    // If a tile has one block, the second half of the warp has no values.
    const int block = b + lane / kSumParts;
    const auto place = place_of<Codec>(layout, first + block);
    float part = sum_of_part<kLowered>(SpreadValues{values, block * quads},
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

// Moves each quad q of a tile of `count` values from place from(q) to place to(q), in the same
// group of eight. change(quad, q, used) changes it on the way; its first `used` values belong to
// the tile. kStays: whether both places are equal. No barrier follows.
template <bool kStays, typename From, typename To, typename Change>
__device__ void move_quads(float* values, int count, int lane, const From& from, const To& to,
                           const Change& change) {
  for (int first = 0; kQuadValues * first < count; first += kWarpSize) {
    const int q = first + lane;
    const bool is_used = kQuadValues * q < count;
    Quad quad = {};
    if (is_used) {
      quad = load_quad(values + kQuadValues * from(q), true);
      change(quad, q, min(kQuadValues, count - kQuadValues * q));
    }
    if constexpr (!kStays) {
      __syncwarp();
    }
    if (is_used) {
      store_quad(quad, values + kQuadValues * to(q), true);
    }
  }
}

// Computes p = value * scale + error for the `count` values of a tile; the values are spread from
// then on. error: that of the first value. No barrier follows.
template <bool kIsSpread>
__device__ void compensate_tile(float* values, int count, float scale, const float* error,
                                int lane) {
  const bool is_aligned = is_aligned_for_quads(error);
  move_quads<kIsSpread>(
      values, count, lane, [](int q) { return kIsSpread ? spread(q) : q; }, spread,
      [&](Quad& quad, int q, int used) {
#pragma unroll
        for (float& value : quad.values) {
          value = value * scale;
        }
        if (error == nullptr) {
          return;
        }
        const Quad lost =
            quad_at(error, kQuadValues * int64_t{q}, kQuadValues * q + used, is_aligned);
#pragma unroll
        for (int j = 0; j < kQuadValues; ++j) {
          quad.values[j] = quad.values[j] + lost.values[j];
        }
      });
}

// Restores the order of a tile's `count` values, and scales them.
__device__ inline void order_tile(float* values, int count, float scale, int lane) {
  move_quads<false>(
      values, count, lane, spread, [](int q) { return q; },
      [&](Quad& quad, int, int) {
        if (scale != 1.0f) {  // scaling by 1 would change the bits of a NaN
#pragma unroll
          for (float& value : quad.values) {
            value = value * scale;
          }
        }
      });
  __syncwarp();
}

// Writes the new errors of a tile's `count` values to the error, from that of the first value on.
// sent: one bit for each lane, set if its block is sent; the error of other blocks stays.
__device__ inline void write_lost(const BlockTile& tile, int block_size, float* values, int count,
                                  uint32_t sent, float* error, int lane) {
  const SpreadValues lost{values, 0};
  const bool is_aligned = is_aligned_for_quads(error);
  for (int q = lane; kQuadValues * q < count; q += kWarpSize) {
    const int first = kQuadValues * q;
    if (sent != kWholeWarp && (sent >> (first / block_size * tile.lanes) & 1) == 0) {
      continue;
    }
    const Quad quad = lost.load(q);
    if (first + kQuadValues <= count) {
      store_quad(quad, error + first, is_aligned);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kQuadValues; ++i) {
      if (first + i < count) {
        error[first + i] = quad.values[i];
      }
    }
  }
}

// Encodes the `count` values of a tile in `values`, which begin with those of block `first`.
// kIsSpread: whether they are spread.
template <bool kIsSpread, typename Codec>
__device__ void encode_tile(const Codec& codec, const codecs::BlockLayout& layout,
                            const BlockTile& tile, int64_t first, int count, int lane, float scale,
                            const DitherKey& key, float* values, float* error, uint8_t* message) {
  const auto size = static_cast<int>(layout.form().block_size);
  const auto among = block_lane(tile, lane);
  const int own_block = lane / tile.lanes;
  const auto own = place_of<Codec>(layout, first + own_block);
  const auto p = block_values(tile, size, lane, values);
  float* const tile_error = error == nullptr ? nullptr : error + first * size;
  auto* const words = reinterpret_cast<uint32_t*>(values) +
                      value_bytes(tile, size) / static_cast<int>(sizeof(uint32_t));
  const bool is_random = Codec::kIsRandom && key.is_random;
  compensate_tile<kIsSpread>(values, count, scale, tile_error, lane);
  SpreadDithers dithers{nullptr, 0, 1};
  if (is_random) {
    const int counters = counters_of(size);
    // The layout's last block may have fewer.
    draw_dithers(key, key.block + first, tile.blocks, counters, words, lane);
    dithers = {words, own_block * counters, counters_of(own.count)};
  }
  __syncwarp();
  typename Codec::Measure measure;
  if constexpr (Codec::kSums) {
    measure.sum = sum_of_magnitudes<Codec, false>(layout, tile, first, lane, values);
    const bool is_infinite = bits_of(measure.sum) >= kInfinity;
    if (__any_sync(kWholeWarp, is_infinite)) {
      const float lowered = sum_of_magnitudes<Codec, true>(layout, tile, first, lane, values);
      measure = is_infinite ? SumOfMagnitudes{lowered, true} : measure;
    }
    __syncwarp();  // all lanes have read the values that errors replace now
  } else {
    visit_values(p, own.count, among, [&](float value) { measure.add(value); });
    if constexpr (Codec::kFits) {
      take_largest(tile.lanes, measure);
      if (!is_random) {
        FittedStep step(measure.words[0]);
        visit_values(p, own.count, among, [&](float value) { step.add(value); });
        step.find_threshold(tile.lanes, own.count);
        visit_values(p, own.count, among, [&](float value) { step.add_larger(value); });
        step.take(tile.lanes, measure);
      }
      __syncwarp();  // for the same reason as below
    } else {
      __syncwarp();  // all lanes have read the values that errors replace now
      take_largest(tile.lanes, measure);
    }
  }
  bool is_sent = true;
  if (own.count > 0) {
    uint8_t* const codes = message + own.codes;
    float parameters[Codec::kParameters];
    typename Codec::Quantizer quantizer;
    is_sent = codec.quantizer(measure, own.count, parameters, quantizer);
    if (is_sent) {
      write_codes(codec, p, dithers, own.count, quantizer, error != nullptr, codes, among);
    } else {  // the error stays as it was
      write_zeros(codes, width_of<Codec>(own.count), among);
      for (float& parameter : parameters) {
        parameter = float_of(kNaN);
      }
    }
    if (among.index == 0) {
      store_parameters(parameters, reinterpret_cast<float*>(message + own.parameters));
    }
    const int64_t shard = layout.shards() == 1 ? 0 : layout.shard_of_block(own.block);
    if (own.block + 1 == layout.first_block(shard + 1)) {
      const auto codes_end = layout.fill_of_codes(shard);
      const auto shard_end = layout.fill_of_parameters(shard);
      write_zeros(message + codes_end.begin, codes_end.end - codes_end.begin, among);
      write_zeros(message + shard_end.begin, shard_end.end - shard_end.begin, among);
    }
  }
  const uint32_t sent = __ballot_sync(kWholeWarp, is_sent);
  __syncwarp();
  if (error != nullptr) {
    write_lost(tile, size, values, count, sent, tile_error, lane);
    __syncwarp();
  }
}

// Writes a tile's values into `values`, spread: their sums over all messages, which have one
// layout.
template <typename Codec, typename Messages>
__device__ void decode_tile(const Codec& codec, const codecs::BlockLayout& layout,
                            const BlockTile& tile, int64_t first, int lane,
                            const Messages& messages, float* values) {
  const auto own = place_of<Codec>(layout, first + lane / tile.lanes);
  if (own.count > 0) {
    const auto size = static_cast<int>(layout.form().block_size);
    read_codes(codec, messages, own.codes, own.parameters, own.count,
               block_values(tile, size, lane, values), block_lane(tile, lane));
  }
  __syncwarp();
}

// The same, for `messages` messages that follow each other in memory.
template <typename Codec>
__device__ void decode_tile(const Codec& codec, const codecs::BlockLayout& layout,
                            const BlockTile& tile, int64_t first, int lane, const uint8_t* message,
                            int64_t messages, float* values) {
  decode_tile(codec, layout, tile, first, lane, MessageRows{message, messages, layout.bytes()},
              values);
}

}  // namespace commhook::cuda
