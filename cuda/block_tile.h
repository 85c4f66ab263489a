// How a warp encodes and decodes blocks, for all codecs that send values in blocks.
//
// A codec says what is its own:
//   kBits, kParameters  of a value's code and of a block
//   kIsRandom           whether it can round with random numbers
//   Measure             of a block: adds values; of each of its words the largest of all lanes
//                       counts
//   kSums               whether that is a SumOfMagnitudes instead
//   quantizer(measure, count, parameters, result)
//                       gives a Quantizer and the parameters; false where a value is infinite or
//                       NaN
//   code(value, dither, is random, quantizer, restored)
//   restorer(parameters)
//                       a function of codes
//
// A Warp holds lanes: on the device one, in each thread; a test on the host holds all and plays
// them one after the other. each(call) calls call(lane, index of what is held for it).
#pragma once

#include "ops/codecs/block_layout.h"
#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/float_bits.h"
#include "ops/codecs/philox.h"
#include "partition.h"
#include "quad.h"

namespace commhook::cuda {

// The lanes of a warp share out its blocks: so many lanes to a block, a power of two, each of which
// then has codes of 16 bytes to move at once, or words of four.
struct BlockTile {
  int lanes;
  int blocks;  // of the warp at once
};

constexpr int kQuadWords = 4;

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

// Which of a block's lanes this is, and of how many; and of the four words that it takes at once,
// the first: neighbours of the warp begin with others, so that they ask different banks of the
// shared memory for their values.
struct BlockLane {
  int index;
  int count;
  int first_word;
};

COMMHOOK_HOST_DEVICE BlockLane block_lane(const BlockTile& tile, int lane) {
  return {lane % tile.lanes, tile.lanes, lane / 2 % kQuadWords};
}

struct alignas(kQuadBytes) QuadWords {
  uint32_t words[kQuadWords];
};

// words[j] becomes words[(j + by) % kQuadWords], in registers: no index of an array may be
// computed.
COMMHOOK_HOST_DEVICE void rotate(uint32_t (&words)[kQuadWords], int by) {
  const uint32_t w[] = {words[0], words[1], words[2], words[3]};
  const bool one = by & 1;
  const uint32_t v[] = {one ? w[1] : w[0], one ? w[2] : w[1], one ? w[3] : w[2], one ? w[0] : w[3]};
  const bool two = by & 2;
  words[0] = two ? v[2] : v[0];
  words[1] = two ? v[3] : v[1];
  words[2] = two ? v[0] : v[2];
  words[3] = two ? v[1] : v[3];
}

// p = value * scale + error for a block's values, and `visit(p)` for those of this lane.
template <typename Visit>
COMMHOOK_HOST_DEVICE void compensate(float* values, int count, float scale, const float* error,
                                     BlockLane lane, const Visit& visit) {
  const bool is_aligned = is_aligned_for_quads(error);
  const int quads = count / 4;
  for (int q = lane.index; q < quads; q += lane.count) {
    Quad p = load_quad(values + 4 * q, true);
    Quad lost = {};
    if (error != nullptr) {
      lost = load_quad(error + 4 * q, is_aligned);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p.values[i] = p.values[i] * scale;
      if (error != nullptr) {
        p.values[i] = p.values[i] + lost.values[i];
      }
      visit(p.values[i]);
    }
    store_quad(p, values + 4 * q, true);
  }
  for (int i = 4 * quads + lane.index; i < count; i += lane.count) {
    float p = values[i] * scale;
    if (error != nullptr) {
      p = p + error[i];
    }
    visit(p);
    values[i] = p;
  }
}

// The sum of magnitudes is taken in so many parts, value i in part i mod kSumParts, which are then
// added in halves.
constexpr int kSumParts = 16;

struct SumOfMagnitudes {
  float sum = 0.0f;

  COMMHOOK_HOST_DEVICE void add(float) {}  // see sum_of_part
};

COMMHOOK_HOST_DEVICE float sum_of_part(const float* p, int count, int part) {
  float sum = 0.0f;
  for (int i = part; i < count; i += kSumParts) {
    sum += float_of(bits_of(p[i]) & kAbsolute);
  }
  return sum;
}

// Random numbers of 16 bits for a block's values: eight from a counter, at equal distances.
struct DitherKey {
  bool is_random;
  uint32_t seed0;
  uint32_t seed1;
  uint32_t step;
};

COMMHOOK_HOST_DEVICE int counters_of(int count) { return (count + 7) / 8; }

COMMHOOK_HOST_DEVICE void draw_dithers(const DitherKey& key, int64_t block, int count,
                                       uint16_t* dithers, BlockLane lane) {
  const int counters = counters_of(count);
  for (int c = lane.index; c < counters; c += lane.count) {
    uint32_t words[4] = {static_cast<uint32_t>(c), static_cast<uint32_t>(block),
                         static_cast<uint32_t>(static_cast<uint64_t>(block) >> 32), key.step};
    philox(words[0], words[1], words[2], words[3], key.seed0, key.seed1);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      dithers[2 * w * counters + c] = static_cast<uint16_t>(words[w]);
      dithers[(2 * w + 1) * counters + c] = static_cast<uint16_t>(words[w] >> 16);
    }
  }
}

// Value k * width + c of a block has its code in byte c of the `width` bytes, at bit k * kBits.
template <typename Codec>
constexpr int kValuesPerByte = 8 / Codec::kBits;

template <typename Codec>
COMMHOOK_HOST_DEVICE int width_of(int count) {
  return (count + kValuesPerByte<Codec> - 1) / kValuesPerByte<Codec>;
}

// Whether a block has a whole number of words of codes, with no gaps in them.
template <typename Codec>
COMMHOOK_HOST_DEVICE bool has_whole_words(int count) {
  return count % (4 * kValuesPerByte<Codec>) == 0;
}

// Whether these words are as many as fill up vectors of 16 bytes, and aligned for them.
template <typename Codec>
COMMHOOK_HOST_DEVICE bool has_whole_quads(const uint8_t* codes, int count) {
  return Codec::kBits >= 4 && count % (kQuadBytes * kValuesPerByte<Codec>) == 0 &&
         is_aligned_for_quads(codes);
}

// Writes a block's codes, and what is lost over its values. dithers: null where there are none.
template <typename Codec>
COMMHOOK_HOST_DEVICE void write_codes(const Codec& codec, float* p, const uint16_t* dithers,
                                      int count, const typename Codec::Quantizer& quantizer,
                                      bool keeps_lost, uint8_t* codes, BlockLane lane) {
  constexpr int kValues = kValuesPerByte<Codec>;
  const int width = width_of<Codec>(count);
  const auto code_of = [&](int i, float value, float& lost) {
    float restored;
    const float dither =
        dithers == nullptr ? 0.0f : blockwise::dither(static_cast<uint32_t>(dithers[i]));
    const uint32_t code = codec.code(value, dither, dithers != nullptr, quantizer, restored);
    lost = value - restored;
    return code;
  };
  const auto word_of = [&](int w) {
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      const int first = k * width + 4 * w;
      const Quad values = load_quad(p + first, true);
      Quad lost;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        word |= code_of(first + j, values.values[j], lost.values[j]) << (8 * j + Codec::kBits * k);
      }
      if (keeps_lost) {
        store_quad(lost, p + first, true);
      }
    }
    return word;
  };
  if (has_whole_quads<Codec>(codes, count)) {
    for (int q = lane.index; q < width / kQuadBytes; q += lane.count) {
      const int begin = lane.first_word;
      QuadWords quad;
#pragma unroll
      for (int j = 0; j < kQuadWords; ++j) {
        quad.words[j] = word_of(kQuadWords * q + (j + begin) % kQuadWords);
      }
      rotate(quad.words, kQuadWords - begin);
      reinterpret_cast<QuadWords*>(codes)[q] = quad;
    }
    return;
  }
  if (has_whole_words<Codec>(count)) {
    for (int w = lane.index; w < width / 4; w += lane.count) {
      reinterpret_cast<uint32_t*>(codes)[w] = word_of(w);
    }
    return;
  }
  for (int c = lane.index; c < width; c += lane.count) {
    uint32_t byte = 0;
    for (int k = 0; k < kValues; ++k) {
      const int i = k * width + c;
      if (i < count) {
        float lost;
        byte |= code_of(i, p[i], lost) << (Codec::kBits * k);
        if (keeps_lost) {
          p[i] = lost;
        }
      }
    }
    codes[c] = static_cast<uint8_t>(byte);
  }
}

// Moves what is lost of a block from where its values were.
COMMHOOK_HOST_DEVICE void write_lost(const float* lost, int count, float* error, BlockLane lane) {
  const bool is_aligned = is_aligned_for_quads(error);
  const int quads = count / 4;
  for (int q = lane.index; q < quads; q += lane.count) {
    store_quad(load_quad(lost + 4 * q, true), error + 4 * q, is_aligned);
  }
  for (int i = 4 * quads + lane.index; i < count; i += lane.count) {
    error[i] = lost[i];
  }
}

// Bytes that hold nothing, or the codes of a block that cannot be sent.
COMMHOOK_HOST_DEVICE void write_zeros(uint8_t* bytes, int64_t count, BlockLane lane) {
  for (int64_t i = lane.index; i < count; i += lane.count) {
    bytes[i] = 0;
  }
}

// Adds the values of a word's codes, or begins with them.
template <typename Codec, typename Restore>
COMMHOOK_HOST_DEVICE void add_word(uint32_t word, const Restore& restore, bool is_first,
                                   Quad* sums) {
  constexpr uint32_t kMask = (1u << Codec::kBits) - 1;
#pragma unroll
  for (int k = 0; k < kValuesPerByte<Codec>; ++k) {
#pragma unroll
    for (int j = 0; j < kQuadValues; ++j) {
      const float value = restore(word >> (8 * j + Codec::kBits * k) & kMask);
      sums[k].values[j] = is_first ? value : sums[k].values[j] + value;
    }
  }
}

// Stores the values of the codes in word w of a block.
template <typename Codec>
COMMHOOK_HOST_DEVICE void store_word(const Quad* sums, int w, int width, float* values) {
#pragma unroll
  for (int k = 0; k < kValuesPerByte<Codec>; ++k) {
    store_quad(sums[k], values + k * width + 4 * w, true);
  }
}

// A block's values: the sum of those of `messages` messages, of which the others lie `stride` bytes
// each past the first.
template <typename Codec>
COMMHOOK_HOST_DEVICE void read_codes(const Codec& codec, const uint8_t* codes,
                                     const float* parameters, int64_t messages, int64_t stride,
                                     int count, float* values, BlockLane lane) {
  constexpr int kValues = kValuesPerByte<Codec>;
  constexpr uint32_t kMask = (1u << Codec::kBits) - 1;
  const int width = width_of<Codec>(count);
  const auto parameters_of = [&](int64_t m) {
    return reinterpret_cast<const float*>(reinterpret_cast<const char*>(parameters) + m * stride);
  };
  if (has_whole_quads<Codec>(codes, count) && stride % kQuadBytes == 0) {
    for (int q = lane.index; q < width / kQuadBytes; q += lane.count) {
      const int begin = lane.first_word;
      Quad sums[kQuadWords][kValues];
      for (int64_t m = 0; m < messages; ++m) {
        QuadWords quad = reinterpret_cast<const QuadWords*>(codes + m * stride)[q];
        rotate(quad.words, begin);
        const auto own = codec.restorer(parameters_of(m));
#pragma unroll
        for (int j = 0; j < kQuadWords; ++j) {
          add_word<Codec>(quad.words[j], own, m == 0, sums[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kQuadWords; ++j) {
        store_word<Codec>(sums[j], kQuadWords * q + (j + begin) % kQuadWords, width, values);
      }
    }
    return;
  }
  if (has_whole_words<Codec>(count)) {
    for (int w = lane.index; w < width / 4; w += lane.count) {
      Quad sums[kValues];
      for (int64_t m = 0; m < messages; ++m) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(codes + m * stride)[w];
        add_word<Codec>(word, codec.restorer(parameters_of(m)), m == 0, sums);
      }
      store_word<Codec>(sums, w, width, values);
    }
    return;
  }
  for (int c = lane.index; c < width; c += lane.count) {
    for (int k = 0; k < kValues && k * width + c < count; ++k) {
      float sum = 0.0f;
      for (int64_t m = 0; m < messages; ++m) {
        const uint32_t byte = codes[m * stride + c];
        const float value = codec.restorer(parameters_of(m))(byte >> (Codec::kBits * k) & kMask);
        sum = m == 0 ? value : sum + value;
      }
      values[k * width + c] = sum;
    }
  }
}

// ---- what a warp does
// ----------------------------------------------------------------------------

// Of one launch.
struct BlockWork {
  int64_t numel;
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

// Encodes a tile's values, which lie in `values`, beginning with those of block `first`.
template <typename Codec, typename Warp>
COMMHOOK_HOST_DEVICE void encode_tile(Warp& warp, const Codec& codec,
                                      const codecs::BlockLayout& layout, const BlockTile& tile,
                                      int64_t first, float scale, const DitherKey& key,
                                      float* values, float* error, uint8_t* message) {
  const auto size = static_cast<int>(layout.form().block_size);
  auto* const dithers = reinterpret_cast<uint16_t*>(values + values_of(tile, size));
  const auto lane_of = [&](int lane) { return block_lane(tile, lane); };
  const auto place = [&](int lane) { return place_of<Codec>(layout, first + lane / tile.lanes); };
  typename Codec::Measure measures[Warp::kHeld];
  warp.each([&](int lane, int held) {
    const auto own = place(lane);
    const int64_t offset = own.begin - first * size;
    compensate(values + offset, own.count, scale, error == nullptr ? nullptr : error + own.begin,
               lane_of(lane), [&](float value) { measures[held].add(value); });
    if constexpr (Codec::kIsRandom) {
      if (key.is_random) {
        draw_dithers(key, own.block, own.count, dithers + offset, lane_of(lane));
      }
    }
  });
  warp.sync();
  if constexpr (Codec::kSums) {
    constexpr int kBlocks = kWarpSize / kSumParts;  // at once
    for (int b = 0; b < tile.blocks; b += kBlocks) {
      float parts[Warp::kHeld];
      warp.each([&](int lane, int held) {
        // Of a tile's only block the second half of the warp has nothing.
        const int own = b + lane / kSumParts;
        const auto other = place_of<Codec>(layout, first + own);
        parts[held] = sum_of_part(values + (other.begin - first * size),
                                  own < tile.blocks ? other.count : 0, lane % kSumParts);
      });
      warp.template add_up<kSumParts>(parts);
      warp.give(parts, [&](int lane) { return lane / tile.lanes % kBlocks * kSumParts; });
      warp.each([&](int lane, int held) {
        if (lane / tile.lanes / kBlocks * kBlocks == b) {
          measures[held].sum = parts[held];
        }
      });
    }
    warp.sync();  // before what is lost takes the place of values that others have read
  } else {
    for (int distance = tile.lanes / 2; distance > 0; distance /= 2) {
      warp.take_largest(measures, distance);
    }
  }
  bool writes_lost[Warp::kHeld];
  warp.each([&](int lane, int held) {
    const auto own = place(lane);
    writes_lost[held] = false;
    if (own.count == 0) {
      return;
    }
    const auto among = lane_of(lane);
    uint8_t* const codes = message + own.codes;
    float parameters[Codec::kParameters];
    typename Codec::Quantizer quantizer;
    if (codec.quantizer(measures[held], own.count, parameters, quantizer)) {
      const int64_t offset = own.begin - first * size;
      write_codes(codec, values + offset,
                  Codec::kIsRandom && key.is_random ? dithers + offset : nullptr, own.count,
                  quantizer, error != nullptr, codes, among);
      writes_lost[held] = error != nullptr;
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
    if (own.count < size) {
      const auto fill = layout.fill();
      write_zeros(message + fill.begin, fill.end - fill.begin, among);
    }
  });
  warp.sync();
  if (error != nullptr) {
    warp.each([&](int lane, int held) {
      if (writes_lost[held]) {
        const auto own = place(lane);
        write_lost(values + (own.begin - first * size), own.count, error + own.begin,
                   lane_of(lane));
      }
    });
    warp.sync();
  }
}

// Writes a tile's values into `values`: the sums of those of `messages` messages.
template <typename Codec, typename Warp>
COMMHOOK_HOST_DEVICE void decode_tile(Warp& warp, const Codec& codec,
                                      const codecs::BlockLayout& layout, const BlockTile& tile,
                                      int64_t first, const uint8_t* message, int64_t messages,
                                      float* values) {
  warp.each([&](int lane, int) {
    const auto own = place_of<Codec>(layout, first + lane / tile.lanes);
    if (own.count > 0) {
      read_codes(codec, message + own.codes,
                 reinterpret_cast<const float*>(message + own.parameters), messages, layout.bytes(),
                 own.count, values + (own.begin - first * layout.form().block_size),
                 block_lane(tile, lane));
    }
  });
  warp.sync();
}

}  // namespace commhook::cuda
