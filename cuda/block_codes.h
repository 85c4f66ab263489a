// What the lanes of a block do with its values and codes, which lie in shared memory and in a
// message. What they need of each other stands in block_tile.cuh, with what a codec must say.
#pragma once

#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/float_bits.h"
#include "ops/codecs/philox.h"
#include "ops/codecs/sign_math.h"
#include "quad.h"

namespace commhook::cuda {

constexpr int kQuadWords = 4;

// Which of a block's lanes this is, and of how many; and of the four words that it takes at once,
// the first: neighbours of the warp begin with others, so that they ask different banks of the
// shared memory for their values.
struct BlockLane {
  int index;
  int count;
  int first_word;
};

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
  bool is_lowered = false;  // see sign_math.h

  COMMHOOK_HOST_DEVICE void add(float) {}  // see sum_of_part
};

template <bool kLowered>
COMMHOOK_HOST_DEVICE float sum_of_part(const float* p, int count, int part) {
  float sum = 0.0f;
  for (int i = part; i < count; i += kSumParts) {
    sum += sign::magnitude_of<kLowered>(p[i]);
  }
  return sum;
}

// Random numbers of 16 bits for a block's values: eight from a counter, at equal distances.
struct DitherKey {
  bool is_random;
  uint32_t seed0;
  uint32_t seed1;
  uint32_t step;
  int64_t block;  // of all messages, with which this one begins
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

// Several messages of the same values: where each begins.
struct MessageRows {  // one after another
  const uint8_t* first;
  int64_t count;
  int64_t stride;  // bytes

  COMMHOOK_HOST_DEVICE const uint8_t* at(int64_t m) const { return first + m * stride; }
  // Whether what is aligned in the first one is aligned in all.
  COMMHOOK_HOST_DEVICE bool are_aligned_alike() const { return stride % kQuadBytes == 0; }
};

// A block's values: the sum of those of all messages. codes, parameters: where the block has them
// in each message, in bytes.
template <typename Codec, typename Messages>
COMMHOOK_HOST_DEVICE void read_codes(const Codec& codec, const Messages& messages, int64_t codes,
                                     int64_t parameters, int count, float* values, BlockLane lane) {
  constexpr int kValues = kValuesPerByte<Codec>;
  constexpr uint32_t kMask = (1u << Codec::kBits) - 1;
  const int width = width_of<Codec>(count);
  const auto codes_of = [&](int64_t m) { return messages.at(m) + codes; };
  const auto parameters_of = [&](int64_t m) {
    return reinterpret_cast<const float*>(messages.at(m) + parameters);
  };
  if (has_whole_quads<Codec>(codes_of(0), count) && messages.are_aligned_alike()) {
    for (int q = lane.index; q < width / kQuadBytes; q += lane.count) {
      const int begin = lane.first_word;
      Quad sums[kQuadWords][kValues];
      for (int64_t m = 0; m < messages.count; ++m) {
        QuadWords quad = reinterpret_cast<const QuadWords*>(codes_of(m))[q];
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
      for (int64_t m = 0; m < messages.count; ++m) {
        const uint32_t word = reinterpret_cast<const uint32_t*>(codes_of(m))[w];
        add_word<Codec>(word, codec.restorer(parameters_of(m)), m == 0, sums);
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
        const float value = codec.restorer(parameters_of(m))(byte >> (Codec::kBits * k) & kMask);
        sum = m == 0 ? value : sum + value;
      }
      values[k * width + c] = sum;
    }
  }
}

}  // namespace commhook::cuda
