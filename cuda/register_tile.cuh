// A warp encodes and decodes 1,024 values at once in its registers: whole blocks of 128, 256, 512
// or 1,024 values. blockwise_block.h shows what a codec must define for this.
//
// Each of a block's lanes has four neighbouring values from each eighth of the block. So the eight
// random numbers of a counter belong to one lane's values, and so do the codes of a byte. Four
// lanes then exchange words of codes, so that each has 16 consecutive bytes. With two bits, two
// lanes exchange words, so that each has 8.
#pragma once

#include "block_codes.h"
#include "block_fit.cuh"
#include "block_places.h"
#include "instructions.h"
#include "tensor_table.h"
#include "warp.cuh"

namespace commhook::cuda {

constexpr int kTileValues = 1024;
constexpr int kEighths = 8;  // eighths of a block, and so quads of a lane
constexpr int kLeastInRegisters = 128;
constexpr int kTileBytes = kTileValues * static_cast<int>(sizeof(float));  // of shared memory

// Whether the values of a codec stay in registers. Values with a code of one bit do not: their sum
// of magnitudes has an order that would need other lanes' values.
template <typename Codec>
constexpr bool kStaysInRegisters = Codec::kBits >= 2;

// Whether tiles consist of whole blocks, and each lane's codes of whole words.
inline bool fits_registers(int64_t block_size) {
  return block_size >= kLeastInRegisters && block_size <= kTileValues &&
         kTileValues % block_size == 0;
}

// The work of one launch.
struct RegisterWork {
  ShardPlaces places;
  int64_t numel;   // values of all launches
  int64_t block;   // the first block of this message, counted over all messages
  uint32_t first;  // the launch's first block
  int block_size;
  int lanes;  // lanes of a block, 2^lane_bits
  int lane_bits;
  int tiles;             // of a warp, one after the other
  uint32_t last_blocks;  // blocks that fill no tile; each has its own warp
  float scale;
  bool is_aligned;  // whether the error is aligned to 16 bytes
};

// The place of a lane's values in its tile.
struct LaneInTile {
  int block;
  int index;  // among the block's lanes
  int first;  // its first value, counted in the tile
  int step;   // from one of its quads to the next, in values
};

COMMHOOK_HOST_DEVICE LaneInTile lane_in_tile(const RegisterWork& work, int lane) {
  const int index = lane & (work.lanes - 1);
  return {lane >> work.lane_bits, index,
          (lane - index) * kEighths * kQuadValues + index * kQuadValues,
          work.block_size / kEighths};
}

template <typename Codec>
constexpr int kWordsOfLane = kEighths * Codec::kBits / 8;

// Words of codes that a lane moves at once: 16 bytes, or 8 if it has no more.
template <int kWords>
constexpr int kWordsAtOnce = kWords < kQuadWords ? kWords : kQuadWords;

// Loads a lane's quads from aligned or unaligned memory.
COMMHOOK_HOST_DEVICE void load_quads(const float* from, int step, bool is_aligned,
                                     Quad (&quads)[kEighths]) {
  if (is_aligned) {
#pragma unroll
    for (int k = 0; k < kEighths; ++k) {
      quads[k] = load_quad(from + k * step, true);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kEighths; ++k) {
    quads[k] = load_quad(from + k * step, false);
  }
}

// kShared: whether `to` is in shared memory.
template <bool kShared>
COMMHOOK_HOST_DEVICE void store_quads(const Quad (&quads)[kEighths], float* to, int step,
                                      bool is_aligned) {
  if (is_aligned) {
#pragma unroll
    for (int k = 0; k < kEighths; ++k) {
      const float (&v)[kQuadValues] = quads[k].values;
      store_vector<kShared>(to + k * step, bits_of(v[0]), bits_of(v[1]), bits_of(v[2]),
                            bits_of(v[3]));
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kEighths; ++k) {
    store_quad(quads[k], to + k * step, false);
  }
}

// The place of the lane's vector `index`, the words of codes that it moves at once.
template <int kWords>
COMMHOOK_HOST_DEVICE int place_of_vector(const LaneInTile& at, int index) {
  constexpr int kAtOnce = kWordsAtOnce<kWords>;
  static_assert(kWords % kAtOnce == 0);
  return (kAtOnce * index + at.index % kAtOnce) * at.step + at.index / kAtOnce * (4 * kAtOnce);
}

struct alignas(8) TwoWords {
  uint32_t words[2];
};

template <int kWords>
COMMHOOK_HOST_DEVICE bool is_aligned_for_vectors(const uint8_t* codes) {
  return reinterpret_cast<uintptr_t>(codes) % (4 * kWordsAtOnce<kWords>) == 0;
}

// Moves the codes in words if their memory is not aligned for vectors. A loop, since predicated
// instructions would cost time in the aligned case too.
template <int kWords>
COMMHOOK_HOST_DEVICE void store_codes(uint32_t (&words)[kWords], const LaneInTile& at,
                                      uint8_t* codes) {
  constexpr int kAtOnce = kWordsAtOnce<kWords>;
  if (is_aligned_for_vectors<kWords>(codes)) {
#pragma unroll
    for (int q = 0; q < kWords / kAtOnce; ++q) {
      uint8_t* const to = codes + place_of_vector<kWords>(at, q);
      const uint32_t* w = words + kAtOnce * q;
      if constexpr (kAtOnce == kQuadWords) {
        store_vector<false>(to, w[0], w[1], w[2], w[3]);
      } else {
        *reinterpret_cast<TwoWords*>(to) = {{w[0], w[1]}};
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kWords; ++i) {
    uint8_t* const to = codes + place_of_vector<kWords>(at, i / kAtOnce);
    reinterpret_cast<uint32_t*>(to)[i % kAtOnce] = words[0];
    rotate_words(words, words[0]);
  }
}

template <int kWords>
COMMHOOK_HOST_DEVICE void load_codes(uint32_t (&words)[kWords], const LaneInTile& at,
                                     const uint8_t* codes) {
  constexpr int kAtOnce = kWordsAtOnce<kWords>;
  using Vector = std::conditional_t<kAtOnce == kQuadWords, QuadWords, TwoWords>;
  if (is_aligned_for_vectors<kWords>(codes)) {
#pragma unroll
    for (int q = 0; q < kWords / kAtOnce; ++q) {
      const auto vector = *reinterpret_cast<const Vector*>(codes + place_of_vector<kWords>(at, q));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        words[kAtOnce * q + j] = vector.words[j];
      }
    }
    return;
  }
#pragma unroll
  for (uint32_t& word : words) {
    word = 0;
  }
#pragma unroll 1
  for (int i = 0; i < kWords; ++i) {
    const uint8_t* const from = codes + place_of_vector<kWords>(at, i / kAtOnce);
    rotate_words(words, reinterpret_cast<const uint32_t*>(from)[i % kAtOnce]);
  }
}

// Transposes the words that lanes move at once: word i of a lane becomes the word that its
// neighbour i had for it. Calling this twice changes nothing.
template <int kWords>
__device__ void transpose(uint32_t (&words)[kWords], int lane) {
#pragma unroll
  for (int distance = 1; distance < kWordsAtOnce<kWords>; distance *= 2) {
    const bool is_upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if ((i & distance) == 0) {
        uint32_t& low = words[i];
        uint32_t& high = words[i + distance];
        const uint32_t given = is_upper ? low : high;
        const uint32_t taken = __shfl_xor_sync(kWholeWarp, given, distance);
        low = is_upper ? taken : low;
        high = is_upper ? high : taken;
      }
    }
  }
}

// Random words for a lane's values: value j of quad k uses half k % 2 of words[j][k / 2].
COMMHOOK_HOST_DEVICE void draw_words(const DitherKey& key, int64_t block, int index,
                                     uint32_t (&words)[kQuadValues][4]) {
#pragma unroll
  for (int j = 0; j < kQuadValues; ++j) {
    words[j][0] = static_cast<uint32_t>(kQuadValues * index + j);
    words[j][1] = static_cast<uint32_t>(block);
    words[j][2] = static_cast<uint32_t>(static_cast<uint64_t>(block) >> 32);
    words[j][3] = key.step;
    philox(words[j][0], words[j][1], words[j][2], words[j][3], key.seed0, key.seed1);
  }
}

// Converts a tile's values, with this lane's in `quads`, into codes and parameters, and `quads`
// into the errors. Returns false if the lane's block cannot be sent. codes, parameters: the
// block's.
template <typename Codec, bool kRandom>
__device__ bool encode_quads(const Codec& codec, const RegisterWork& work, const LaneInTile& at,
                             int lane, const DitherKey& key, uint32_t block,
                             Quad (&quads)[kEighths], uint8_t* codes, float* parameters) {
  typename Codec::Measure measured;
#pragma unroll
  for (const Quad& quad : quads) {
#pragma unroll
    for (const float value : quad.values) {
      measured.add(value);
    }
  }
  take_largest(work.lanes, measured);
  if constexpr (Codec::kFits && !kRandom) {
    FittedStep step(measured.words[0]);
#pragma unroll
    for (int i = 0; i < kEighths * kQuadValues; ++i) {
      step.add(quads[i / kQuadValues].values[i % kQuadValues]);
    }
    step.find_threshold(work.lanes, work.block_size);
#pragma unroll
    for (int i = 0; i < kEighths * kQuadValues; ++i) {
      step.add_larger(quads[i / kQuadValues].values[i % kQuadValues]);
    }
    step.take(work.lanes, measured);
  }
  float own[Codec::kParameters];
  typename Codec::Quantizer quantizer;
  const bool is_sent = codec.quantizer(measured, work.block_size, own, quantizer);
  uint32_t random[kQuadValues][4] = {};
  if constexpr (kRandom) {
    draw_words(key, key.block + block, at.index, random);
  }
  constexpr int kWords = kWordsOfLane<Codec>;
  uint32_t words[kWords];
#pragma unroll
  for (int k = 0; k < kEighths; ++k) {
    float dithers[kQuadValues] = {};
    if constexpr (kRandom) {
#pragma unroll
      for (int j = 0; j < kQuadValues; ++j) {
        dithers[j] = dither_of_half(random[j][k / 2], k % 2 == 1);
      }
    }
    const uint32_t word = codec.template codes<kRandom>(quads[k], dithers, quantizer);
    if constexpr (Codec::kBits == 8) {
      words[k] = word;
    } else if constexpr (Codec::kBits == 4) {
      if (k < kWords) {
        words[k] = word;
      } else {
        words[k - kWords] = (words[k - kWords] & 0x0f0f0f0fu) | (word << 4 & 0xf0f0f0f0u);
      }
    } else if (k < kWords) {
      words[k] = word & 0x03030303u;
    } else {
      words[k % kWords] |= (word & 0x03030303u) << (Codec::kBits * (k / kWords));
    }
  }
  if (!is_sent) {
#pragma unroll
    for (uint32_t& word : words) {
      word = 0;
    }
#pragma unroll
    for (float& parameter : own) {
      parameter = float_of(kNaN);
    }
  }
  transpose(words, lane);
  store_codes(words, at, codes);
  if (at.index == 0) {
    store_parameters(own, parameters);
  }
  return is_sent;
}

// The codes and parameters of one message that a lane reads for its tile.
template <typename Codec>
struct TileCodes {
  uint32_t words[kWordsOfLane<Codec>];
  float parameters[Codec::kParameters];

  COMMHOOK_HOST_DEVICE void load(const LaneInTile& at, const uint8_t* codes, const float* from) {
    load_codes(words, at, codes);
    load_parameters(from, parameters);
  }
};

// Adds the values of a tile's codes, or stores them if they are the first.
template <typename Codec, bool kFirst>
__device__ void add_codes(const Codec& codec, TileCodes<Codec>& tile, int lane,
                          Quad (&quads)[kEighths]) {
  constexpr int kWords = kWordsOfLane<Codec>;
  transpose(tile.words, lane);
#pragma unroll
  for (int k = 0; k < kEighths; ++k) {
    uint32_t word = tile.words[k % kWords];
    if constexpr (Codec::kBits < 8) {
      constexpr uint32_t kMask = ((1u << Codec::kBits) - 1) * 0x01010101u;
      word = word >> (Codec::kBits * (k / kWords)) & kMask;
    }
    const Quad values = codec.restored(word, tile.parameters);
#pragma unroll
    for (int j = 0; j < kQuadValues; ++j) {
      quads[k].values[j] = kFirst ? values.values[j] : quads[k].values[j] + values.values[j];
    }
  }
}

// Sums the tile's values over all messages, which are `stride` bytes apart. Loads the next
// message's codes while it adds one's values.
template <typename Codec, bool kMany>
__device__ void decode_quads(const Codec& codec, const LaneInTile& at, int lane,
                             const uint8_t* codes, const float* parameters, int64_t messages,
                             int64_t stride, Quad (&quads)[kEighths]) {
  TileCodes<Codec> tile;
  tile.load(at, codes, parameters);
  if constexpr (!kMany) {
    add_codes<Codec, true>(codec, tile, lane, quads);
  } else {
#pragma unroll
    for (Quad& quad : quads) {
      quad = {-0.0f, -0.0f, -0.0f, -0.0f};  // the neutral element, also for -0
    }
#pragma unroll 1
    for (int64_t m = 1; m <= messages; ++m) {
      TileCodes<Codec> now = tile;
      if (m < messages) {
        codes += stride;
        parameters =
            reinterpret_cast<const float*>(reinterpret_cast<const char*>(parameters) + stride);
        tile.load(at, codes, parameters);
      }
      add_codes<Codec, false>(codec, now, lane, quads);
    }
  }
}

// ---- a launch's last blocks, which fill no tile ------------------------------------------------

template <typename Codec>
COMMHOOK_HOST_DEVICE uint32_t message_byte(const Codec& codec, float* p, int count, int c,
                                           bool is_random, const DitherKey& key, int64_t block,
                                           const typename Codec::Quantizer& quantizer) {
  const int width = width_of<Codec>(count);
  const int counters = counters_of(count);
  uint32_t byte = 0;
#pragma unroll 1
  for (int k = 0; k < kValuesPerByte<Codec> && k * width + c < count; ++k) {
    const int i = k * width + c;
    float dither = 0.0f;
    if (is_random) {
      uint32_t words[4] = {static_cast<uint32_t>(i % counters), static_cast<uint32_t>(block),
                           static_cast<uint32_t>(static_cast<uint64_t>(block) >> 32), key.step};
      philox(words[0], words[1], words[2], words[3], key.seed0, key.seed1);
      const int half = i / counters;
      const uint32_t low = half < 2   ? words[0]
                           : half < 4 ? words[1]
                           : half < 6 ? words[2]
                                      : words[3];
      dither = dither_of_half(low, half % 2 == 1);
    }
    float restored;
    byte |= codec.code(p[i], dither, is_random, quantizer, restored) << (Codec::kBits * k);
    p[i] = p[i] - restored;
  }
  return byte;
}

// All lanes of the warp encode a block of any size. p: its values, in shared memory. error: null if
// there is none.
template <typename Codec, bool kRandom>
__device__ void encode_block(const Codec& codec, int count, float scale, const DitherKey& key,
                             int64_t block, float* p, float* error, uint8_t* codes,
                             float* parameters, int lane) {
  typename Codec::Measure measured;
#pragma unroll 1
  for (int i = lane; i < count; i += kWarpSize) {
    float value = p[i] * scale;
    if (error != nullptr) {
      value = value + error[i];
    }
    p[i] = value;
    measured.add(value);
  }
  take_largest(kWarpSize, measured);
  if constexpr (Codec::kFits && !kRandom) {
    FittedStep step(measured.words[0]);
#pragma unroll 1
    for (int i = lane; i < count; i += kWarpSize) {
      step.add(p[i]);
    }
    step.find_threshold(kWarpSize, count);
#pragma unroll 1
    for (int i = lane; i < count; i += kWarpSize) {
      step.add_larger(p[i]);
    }
    step.take(kWarpSize, measured);
  }
  // Otherwise a lane has the same values all the time.
  constexpr bool kIsShared = kValuesPerByte<Codec> > 1;
  if constexpr (kIsShared) {
    __syncwarp();
  }
  float own[Codec::kParameters];
  typename Codec::Quantizer quantizer;
  const bool is_sent = codec.quantizer(measured, count, own, quantizer);
#pragma unroll 1
  for (int c = lane; c < width_of<Codec>(count); c += kWarpSize) {
    codes[c] = 0;
    if (is_sent) {
      codes[c] =
          static_cast<uint8_t>(message_byte(codec, p, count, c, kRandom, key, block, quantizer));
    }
  }
  if constexpr (kIsShared) {
    __syncwarp();
  }
  if (error != nullptr && is_sent) {
#pragma unroll 1
    for (int i = lane; i < count; i += kWarpSize) {
      error[i] = p[i];
    }
  }
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < Codec::kParameters; ++i) {
      parameters[i] = is_sent ? own[i] : float_of(kNaN);
    }
  }
}

// Sums the block's values over all messages, in their order.
template <typename Codec>
__device__ void decode_block(const Codec& codec, int count, const uint8_t* codes,
                             const float* parameters, int64_t messages, int64_t stride,
                             float* values, int lane) {
  constexpr int kValues = 8;  // of a lane at once; their codes are loaded together
  const int width = width_of<Codec>(count);
#pragma unroll 1
  for (int begin = lane; begin < count; begin += kValues * kWarpSize) {
    int places[kValues];
    int shifts[kValues];
    float sums[kValues];
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const int i = min(begin + v * kWarpSize, count - 1);
      places[v] = i % width;
      shifts[v] = i / width * Codec::kBits;
      sums[v] = -0.0f;  // the neutral element, also for -0
    }
#pragma unroll 1
    for (int64_t m = 0; m < messages; ++m) {
      const auto restorer = codec.restorer(
          reinterpret_cast<const float*>(reinterpret_cast<const char*>(parameters) + m * stride));
      uint32_t own[kValues];
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        own[v] = codes[m * stride + places[v]];
      }
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        sums[v] = sums[v] + restorer(own[v] >> shifts[v] & ((1u << Codec::kBits) - 1));
      }
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if (begin + v * kWarpSize < count) {
        values[begin + v * kWarpSize] = sums[v];
      }
    }
  }
}

}  // namespace commhook::cuda
