// How a warp encodes and decodes blocks, for all codecs that send values in blocks.
//
// A codec says what is its own:
//   kBits, kParameters  of a value's code and of a block
//   kIsRandom           whether it can round with random numbers
//   Measure             accumulates a block's values; each word is max-reduced across its lanes
//   kSums               whether that is a SumOfMagnitudes instead
//   kFits               whether, where it does not round at random, the step is that of
//   block_fit.cuh quantizer(measure, count, parameters, result)
//                       gives a Quantizer and the parameters; false where a value is infinite or
//                       NaN
//   code(value, dither, is random, quantizer, restored)
//   restorer(parameters)
//                       a function of codes
#pragma once

#include "block_codes.h"
#include "block_fit.cuh"
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
  return {lane % tile.lanes, tile.lanes};
}

// The values of a lane's block, of a tile's `values`.
COMMHOOK_HOST_DEVICE SpreadValues block_values(const BlockTile& tile, int block_size, int lane,
                                               float* values) {
  return {values, lane / tile.lanes * (block_size / kQuadValues)};
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
COMMHOOK_HOST_DEVICE int value_bytes(const BlockTile& tile, int block_size) {
  return spread_bytes(values_of(tile, block_size) / kQuadValues);
}

COMMHOOK_HOST_DEVICE int shared_bytes(const BlockTile& tile, int block_size, bool is_random) {
  return value_bytes(tile, block_size) +
         (is_random ? spread_bytes(tile.blocks * counters_of(block_size) + kQuadWords - 1) : 0);
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
                                   int64_t first, int lane, float* values) {
  constexpr int kBlocks = kWarpSize / kSumParts;  // at once
  const auto quads = static_cast<int>(layout.form().block_size) / kQuadValues;
  float sum = 0.0f;
  for (int b = 0; b < tile.blocks; b += kBlocks) {
    // Of a tile's only block the second half of the warp has nothing.
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

// Moves each quad q of a tile of `count` values from place from(q) to place to(q), which is among
// the same eight. change(quad, q, used) changes it on the way: its first `used` values are the
// tile's. kStays: whether both places are one. No barrier follows.
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

// p = value * scale + error for a tile's values, `count` of them, which are spread from now on.
// error: of the first one. No barrier follows.
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

// Puts a tile's values, `count` of them, in their order, times a scale.
__device__ inline void order_tile(float* values, int count, float scale, int lane) {
  move_quads<false>(
      values, count, lane, spread, [](int q) { return q; },
      [&](Quad& quad, int, int) {
        if (scale != 1.0f) {  // which would change the bits of a NaN
#pragma unroll
          for (float& value : quad.values) {
            value = value * scale;
          }
        }
      });
  __syncwarp();
}

// Writes what is lost of a tile's values, `count` of them, to the error of the first one. sent: a
// bit for each lane, whether its block is sent; the error of the others stays.
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

// Encodes a tile's values, `count` of them, which lie in `values`, beginning with those of block
// `first`. kIsSpread: whether they are spread.
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
    // Of the layout's last block there may be fewer.
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
    __syncwarp();  // before what is lost takes the place of values that others have read
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
      __syncwarp();  // as below
    } else {
      __syncwarp();  // before what is lost takes the place of values that others have read
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
    } else {  // with the error as it was
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

// Writes a tile's values into `values`, spread: the sums of those of all messages, of the same
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

// The same, of `messages` messages that follow one another.
template <typename Codec>
__device__ void decode_tile(const Codec& codec, const codecs::BlockLayout& layout,
                            const BlockTile& tile, int64_t first, int lane, const uint8_t* message,
                            int64_t messages, float* values) {
  decode_tile(codec, layout, tile, first, lane, MessageRows{message, messages, layout.bytes()},
              values);
}

}  // namespace commhook::cuda
