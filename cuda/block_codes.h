// The work of a block's lanes on its values and codes, in shared memory and in a message.
// block_tile.cuh has the exchange between lanes, and the requirements for a codec.
#pragma once

#include "instructions.h"
#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/float_bits.h"
#include "ops/codecs/philox.h"
#include "ops/codecs/sign_math.h"
#include "partition.h"
#include "quad.h"

namespace commhook::cuda {

constexpr int kQuadWords = 4;

// A lane's index among the lanes of its block, and their number.
struct BlockLane {
  int index;
  int count;
};

struct alignas(kQuadBytes) QuadWords {
  uint32_t words[kQuadWords];
};

// words[i] becomes words[i + 1], and the last word becomes `last`.
template <int kWords>
COMMHOOK_HOST_DEVICE void rotate_words(uint32_t (&words)[kWords], uint32_t last) {
#pragma unroll
  for (int i = 0; i + 1 < kWords; ++i) {
    words[i] = words[i + 1];
  }
  words[kWords - 1] = last;
}

// The place of vector `index`, of 16 bytes, in a warp's shared memory. Eight vectors fill all banks
// once. A vector stays within its group of eight; each upper bit of its index changes its place
// there in a different way. So eight neighbouring lanes reach all banks at once in two cases.
// Either their vectors are a power of two apart, up to 64. Or each of several blocks has two or
// four neighbouring vectors, or two that are four apart. The same holds for the halves of a warp
// that read the same four vectors of two neighbouring blocks.
COMMHOOK_HOST_DEVICE int spread(int index) {
  const int above = (index >> 3 ^ index >> 6) & 7;
  // The XOR of 7, 5 and 6 for the three bits of `above`, as a table with one digit for each value.
  return index ^ static_cast<int>(0x43162570u >> (4 * above) & 7u);
}

// The bytes of `vectors` in shared memory, rounded up to whole groups of eight.
COMMHOOK_HOST_DEVICE int spread_bytes(int vectors) { return (vectors + 7) / 8 * 8 * kQuadBytes; }

// A block's values in shared memory, spread; they begin at quad `first`.
struct SpreadValues {
  float* values;
  int first;

  COMMHOOK_HOST_DEVICE float* quad(int q) const { return values + kQuadValues * spread(first + q); }
  COMMHOOK_HOST_DEVICE float& at(int i) const { return quad(i / kQuadValues)[i % kQuadValues]; }
  COMMHOOK_HOST_DEVICE Quad load(int q) const { return load_quad(quad(q), true); }
  COMMHOOK_HOST_DEVICE void store(const Quad& value, int q) const {
    store_quad(value, quad(q), true);
  }
};

// Calls visit(value) for this lane's values of a block.
template <typename Visit>
COMMHOOK_HOST_DEVICE void visit_values(const SpreadValues& p, int count, BlockLane lane,
                                       const Visit& visit) {
  const int quads = count / kQuadValues;
  for (int q = lane.index; q < quads; q += lane.count) {
    const Quad quad = p.load(q);
#pragma unroll
    for (const float value : quad.values) {
      visit(value);
    }
  }
  for (int i = kQuadValues * quads + lane.index; i < count; i += lane.count) {
    visit(p.at(i));
  }
}

// The sum of magnitudes has kSumParts parts, with value i in part i mod kSumParts. The parts are
// then added in halves.
constexpr int kSumParts = 16;

struct SumOfMagnitudes {
  float sum = 0.0f;
  bool is_lowered = false;  // see sign_math.h
};

template <bool kLowered>
COMMHOOK_HOST_DEVICE float sum_of_part(const SpreadValues& p, int count, int part) {
  float sum = 0.0f;
  for (int i = part; i < count; i += kSumParts) {
    sum += sign::magnitude_of<kLowered>(p.at(i));
  }
  return sum;
}

// The key of the random numbers of 16 bits for a block's values. Each counter gives eight of them,
// for values at equal distances.
struct DitherKey {
  bool is_random;
  uint32_t seed0;
  uint32_t seed1;
  uint32_t step;
  int64_t block;  // the first block of this message, counted over all messages
};

COMMHOOK_HOST_DEVICE int counters_of(int count) { return (count + 7) / 8; }

// The words of a tile's counters in shared memory, spread. Of four consecutive counters, vector w
// holds the words w. The block's counters begin with `first`.
struct SpreadDithers {
  const uint32_t* words;  // null if there are none
  int first;
  int counters;  // of the block

  COMMHOOK_HOST_DEVICE float at(int i) const {
    const int half = i / counters;
    const int counter = first + i % counters;
    const int vector = counter / kQuadWords * kQuadWords + half / 2;
    const uint32_t word = words[kQuadWords * spread(vector) + counter % kQuadWords];
    return dither_of_half(word, half % 2 == 1);
  }

  // The random numbers of the block's quad q.
  COMMHOOK_HOST_DEVICE Quad quad(int q) const {
    if (counters % kQuadWords == 0 && first % kQuadWords == 0) {
      const int per_half = counters / kQuadWords;  // quads
      const int half = q / per_half;
      const int vector = first + (q - half * per_half) * kQuadWords + half / 2;
      const QuadWords four =
          *reinterpret_cast<const QuadWords*>(words + kQuadWords * spread(vector));
      const bool is_upper = half % 2 == 1;
      return {dither_of_half(four.words[0], is_upper), dither_of_half(four.words[1], is_upper),
              dither_of_half(four.words[2], is_upper), dither_of_half(four.words[3], is_upper)};
    }
    if (counters == 2 && first % 2 == 0) {  // both halves of both counters' word q
      const int vector = first / kQuadWords * kQuadWords + q;
      struct alignas(8) Pair {
        uint32_t words[2];
      };
      const auto pair =
          *reinterpret_cast<const Pair*>(words + kQuadWords * spread(vector) + first % kQuadWords);
      return {dither_of_half(pair.words[0], false), dither_of_half(pair.words[1], false),
              dither_of_half(pair.words[0], true), dither_of_half(pair.words[1], true)};
    }
    return {at(4 * q), at(4 * q + 1), at(4 * q + 2), at(4 * q + 3)};
  }
};

// Draws the random numbers of a tile's blocks, from block `first` on; each has `counters` counters.
COMMHOOK_HOST_DEVICE void draw_dithers(const DitherKey& key, int64_t first, int blocks,
                                       int counters, uint32_t* words, int lane) {
  const int all = blocks * counters;
  for (int group = lane; kQuadWords * group < all; group += kWarpSize) {
    int block = kQuadWords * group / counters;
    int counter = kQuadWords * group - block * counters;
    QuadWords drawn[4] = {};
#pragma unroll 1  // needs fewer registers
    for (int c = 0; c < kQuadWords; ++c) {
      const int64_t own = first + block;
      uint32_t four[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(own),
                          static_cast<uint32_t>(static_cast<uint64_t>(own) >> 32), key.step};
      philox(four[0], four[1], four[2], four[3], key.seed0, key.seed1);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        rotate_words(drawn[w].words, four[w]);
      }
      if (++counter == counters) {
        counter = 0;
        ++block;
      }
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      reinterpret_cast<QuadWords*>(words)[spread(kQuadWords * group + w)] = drawn[w];
    }
  }
}

// The code of value k * width + c is in byte c of the block's `width` bytes, at bit k * kBits.
template <typename Codec>
constexpr int kValuesPerByte = 8 / Codec::kBits;

template <typename Codec>
COMMHOOK_HOST_DEVICE int width_of(int count) {
  static_assert(8 % Codec::kBits == 0, "a byte holds a whole number of codes: 1, 2, 4 or 8 bits");
  return (count + kValuesPerByte<Codec> - 1) / kValuesPerByte<Codec>;
}

// Whether a block's codes fill whole words.
template <typename Codec>
COMMHOOK_HOST_DEVICE bool has_whole_words(int count) {
  return count % (4 * kValuesPerByte<Codec>) == 0;
}

// Whether these words also fill whole vectors of 16 bytes, and are aligned for them.
template <typename Codec>
COMMHOOK_HOST_DEVICE bool has_whole_quads(const uint8_t* codes, int count) {
  return Codec::kBits >= 4 && count % (kQuadBytes * kValuesPerByte<Codec>) == 0 &&
         is_aligned_for_quads(codes);
}

// Writes a block's codes, and the new errors over its values.
template <typename Codec>
COMMHOOK_HOST_DEVICE void write_codes(const Codec& codec, const SpreadValues& p,
                                      const SpreadDithers& dithers, int count,
                                      const typename Codec::Quantizer& quantizer, bool keeps_lost,
                                      uint8_t* codes, BlockLane lane) {
  constexpr int kValues = kValuesPerByte<Codec>;
  const int width = width_of<Codec>(count);
  const bool is_random = Codec::kIsRandom && dithers.words != nullptr;
  const auto code_of = [&](float value, float dither, float& lost) {
    float restored;
    const uint32_t code = codec.code(value, dither, is_random, quantizer, restored);
    lost = value - restored;
    return code;
  };
  const auto word_of = [&](int w) {
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      const int q = k * (width / kQuadValues) + w;
      const Quad values = p.load(q);
      Quad random = {};
      if constexpr (Codec::kIsRandom) {
        if (is_random) {
          random = dithers.quad(q);
        }
      }
      Quad lost;
#pragma unroll
      for (int j = 0; j < kQuadValues; ++j) {
        word |= code_of(values.values[j], random.values[j], lost.values[j])
                << (8 * j + Codec::kBits * k);
      }
      if (keeps_lost) {
        p.store(lost, q);
      }
    }
    return word;
  };
  if (has_whole_quads<Codec>(codes, count)) {
    for (int v = lane.index; v < width / kQuadBytes; v += lane.count) {
      QuadWords quad = {};
#pragma unroll 1  // needs fewer registers
      for (int j = 0; j < kQuadWords; ++j) {
        rotate_words(quad.words, word_of(kQuadWords * v + j));
      }
      reinterpret_cast<QuadWords*>(codes)[v] = quad;
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
        const float dither = is_random ? dithers.at(i) : 0.0f;
        float lost;
        byte |= code_of(p.at(i), dither, lost) << (Codec::kBits * k);
        if (keeps_lost) {
          p.at(i) = lost;
        }
      }
    }
    codes[c] = static_cast<uint8_t>(byte);
  }
}

// Zeroes padding, or the codes of a block that cannot be sent.
COMMHOOK_HOST_DEVICE void write_zeros(uint8_t* bytes, int64_t count, BlockLane lane) {
  for (int64_t i = lane.index; i < count; i += lane.count) {
    bytes[i] = 0;
  }
}

// Adds the values of a word's codes, or stores them if they are the first.
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
COMMHOOK_HOST_DEVICE void store_word(const Quad* sums, int w, int width,
                                     const SpreadValues& values) {
#pragma unroll
  for (int k = 0; k < kValuesPerByte<Codec>; ++k) {
    values.store(sums[k], k * (width / kQuadValues) + w);
  }
}

// A block's parameters: two are moved at once if their memory is aligned for that.
struct alignas(8) TwoParameters {
  float values[2];
};

template <int kParameters>
COMMHOOK_HOST_DEVICE void load_parameters(const float* from, float (&parameters)[kParameters]) {
  if constexpr (kParameters == 2) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(TwoParameters) == 0) {
      const auto both = *reinterpret_cast<const TwoParameters*>(from);
      parameters[0] = both.values[0];
      parameters[1] = both.values[1];
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kParameters; ++i) {
    parameters[i] = from[i];
  }
}

template <int kParameters>
COMMHOOK_HOST_DEVICE void store_parameters(const float (&parameters)[kParameters], float* to) {
  if constexpr (kParameters == 2) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(TwoParameters) == 0) {
      *reinterpret_cast<TwoParameters*>(to) = {parameters[0], parameters[1]};
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kParameters; ++i) {
    to[i] = parameters[i];
  }
}

// Several messages of the same values, with their beginnings.
struct MessageRows {  // one after another
  const uint8_t* first;
  int64_t count;
  int64_t stride;  // bytes

  COMMHOOK_HOST_DEVICE const uint8_t* at(int64_t m) const { return first + m * stride; }
  // Whether a place that is aligned in the first message is aligned in all.
  COMMHOOK_HOST_DEVICE bool are_aligned_alike() const { return stride % kQuadBytes == 0; }
};

// Sums a block's values over all messages. codes, parameters: the block's places in each message,
// in bytes.
template <typename Codec, typename Messages>
COMMHOOK_HOST_DEVICE void read_codes(const Codec& codec, const Messages& messages, int64_t codes,
                                     int64_t parameters, int count, const SpreadValues& values,
                                     BlockLane lane) {
  constexpr int kValues = kValuesPerByte<Codec>;
  constexpr uint32_t kMask = (1u << Codec::kBits) - 1;
  const int width = width_of<Codec>(count);
  const auto codes_of = [&](int64_t m) { return messages.at(m) + codes; };
  const auto restorer_of = [&](int64_t m) {
    float own[Codec::kParameters];
    load_parameters(reinterpret_cast<const float*>(messages.at(m) + parameters), own);
    return codec.restorer(own);
  };
  if (has_whole_quads<Codec>(codes_of(0), count) && messages.are_aligned_alike()) {
    for (int v = lane.index; v < width / kQuadBytes; v += lane.count) {
      Quad sums[kQuadWords][kValues];
      for (int64_t m = 0; m < messages.count; ++m) {
        const auto quad = reinterpret_cast<const QuadWords*>(codes_of(m))[v];
        const auto own = restorer_of(m);
#pragma unroll
        for (int j = 0; j < kQuadWords; ++j) {
          add_word<Codec>(quad.words[j], own, m == 0, sums[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kQuadWords; ++j) {
        store_word<Codec>(sums[j], kQuadWords * v + j, width, values);
      }
    }
    return;
  }
  if (has_whole_words<Codec>(count)) {
    for (int w = lane.index; w < width / 4; w += lane.count) {
      Quad sums[kValues];
      for (int64_t m = 0; m < messages.count; ++m) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(codes_of(m))[w];
        add_word<Codec>(word, restorer_of(m), m == 0, sums);
      }
      store_word<Codec>(sums, w, width, values);
    }
    return;
  }
  for (int c = lane.index; c < width; c += lane.count) {
    for (int k = 0; k < kValues && k * width + c < count; ++k) {
      float sum = 0.0f;
      for (int64_t m = 0; m < messages.count; ++m) {
        const uint32_t byte = codes_of(m)[c];
        const float value = restorer_of(m)(byte >> (Codec::kBits * k) & kMask);
        sum = m == 0 ? value : sum + value;
      }
      values.at(k * width + c) = sum;
    }
  }
}

}  // namespace commhook::cuda
