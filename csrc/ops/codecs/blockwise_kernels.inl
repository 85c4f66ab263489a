// The kernels of block quantisation for one instruction set: see cpu/for_each_instruction_set.h.
// Plain loops, which compilers turn into vectors: maxima and minima are taken of integers that are
// ordered as the floats are, since those of floats may not be reordered.
#include "ops/codecs/block_codec_kernels.inl"

// A float's bits as an integer of the same order.
inline int32_t ordered(uint32_t bits) {
  return static_cast<int32_t>(bits ^ ((0u - (bits >> 31)) & kAbsolute));
}
inline float of_ordered(int32_t order) {
  const auto bits = static_cast<uint32_t>(order);
  return float_of(bits ^ ((0u - (bits >> 31)) & kAbsolute));
}

// Random numbers of 16 bits for the values of a block: eight from a counter, at equal distances, so
// that vectors of counters give vectors of them.
inline void draw_dither(const Rounding& rounding, int64_t block, int64_t n, float* dithers) {
  constexpr int32_t kMost = kMaxBlockSize / 8;
  alignas(64) uint32_t words[4][kMost];
  const auto counters = static_cast<int32_t>((n + 7) / 8);
  const auto low = static_cast<uint32_t>(block);
  const auto high = static_cast<uint32_t>(block >> 32);
  const uint32_t step = rounding.step;
  const uint32_t key0 = rounding.seed0;
  const uint32_t key1 = rounding.seed1;
  for (int32_t c = 0; c < counters; ++c) {
    auto c0 = static_cast<uint32_t>(c);
    uint32_t c1 = low;
    uint32_t c2 = high;
    uint32_t c3 = step;
    philox(c0, c1, c2, c3, key0, key1);
    words[0][c] = c0;
    words[1][c] = c1;
    words[2][c] = c2;
    words[3][c] = c3;
  }
  for (int w = 0; w < 4; ++w) {
    for (int32_t c = 0; c < counters; ++c) {
      dithers[2 * w * counters + c] = dither(words[w][c] & 0xffffu);
    }
    for (int32_t c = 0; c < counters; ++c) {
      dithers[(2 * w + 1) * counters + c] = dither(words[w][c] >> 16);
    }
  }
}

// Integers for n values, in bytes.
template <bool kSymmetric, bool kDithered, bool kError>
inline void quantize(const float* __restrict p, int64_t n, const Quantizer& quantizer, float low,
                     float levels, const float* __restrict dithers, float* __restrict error,
                     uint8_t* __restrict codes) {
  const float factor = quantizer.factor;
  const float step = quantizer.step;
  for (int64_t i = 0; i < n; ++i) {
    float t = kSymmetric ? p[i] * factor : (p[i] - low) * factor;
    if constexpr (kDithered) {
      t = t + dithers[i];
      t = t > levels ? levels : t;  // what is added may have been rounded up
    }
    const float rounded = t + kRound;
    codes[i] = static_cast<uint8_t>(bits_of(rounded));
    if constexpr (kError) {
      const float restored = (rounded - kRound) * step;
      error[i] = p[i] - (kSymmetric ? restored : low + restored);
    }
  }
}

// The same for values so small that they must be lifted first; rare, and as slow as it likes.
template <bool kSymmetric>
inline void quantize_lifted(const float* p, int64_t n, const Quantizer& quantizer, float low,
                            float levels, const float* dithers, float* error, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    float t = (p[i] * quantizer.lift - quantizer.low) * quantizer.factor;
    if (dithers != nullptr) {
      t = t + dithers[i];
      t = t > levels ? levels : t;
    }
    const float rounded = t + kRound;
    codes[i] = static_cast<uint8_t>(bits_of(rounded));
    if (error != nullptr) {
      const float restored = (rounded - kRound) * quantizer.step;
      error[i] = p[i] - (kSymmetric ? restored : low + restored);
    }
  }
}

template <bool kSymmetric>
inline void quantize_any(const float* p, int64_t n, const Quantizer& quantizer, float low,
                         float levels, const float* dithers, float* error, uint8_t* codes) {
  if (quantizer.lift != 1.0f) {
    quantize_lifted<kSymmetric>(p, n, quantizer, low, levels, dithers, error, codes);
  } else if (dithers != nullptr) {
    if (error != nullptr) {
      quantize<kSymmetric, true, true>(p, n, quantizer, low, levels, dithers, error, codes);
    } else {
      quantize<kSymmetric, true, false>(p, n, quantizer, low, levels, dithers, error, codes);
    }
  } else if (error != nullptr) {
    quantize<kSymmetric, false, true>(p, n, quantizer, low, levels, dithers, error, codes);
  } else {
    quantize<kSymmetric, false, false>(p, n, quantizer, low, levels, dithers, error, codes);
  }
}

// Two values in a byte: that of the first half of the block in the low bits, that of the second
// half in the high ones.
inline void pack(const uint8_t* __restrict bytes, int64_t n, uint8_t* __restrict packed) {
  const int64_t half = (n + 1) / 2;
  for (int64_t i = 0; i < n - half; ++i) {
    packed[i] = static_cast<uint8_t>((bytes[i] & 15u) | (bytes[half + i] << 4));
  }
  if (2 * half > n) {
    packed[half - 1] = static_cast<uint8_t>(bytes[half - 1] & 15u);
  }
}

template <bool kSymmetric>
inline void unpack(const uint8_t* __restrict packed, int64_t n, uint8_t* __restrict bytes) {
  const int64_t half = (n + 1) / 2;
  constexpr unsigned kSign = kSymmetric ? 8 : 0;
  for (int64_t i = 0; i < half; ++i) {
    bytes[i] = static_cast<uint8_t>(((packed[i] & 15u) ^ kSign) - kSign);
  }
  for (int64_t i = 0; i < n - half; ++i) {
    bytes[half + i] = static_cast<uint8_t>((static_cast<unsigned>(packed[i] >> 4) ^ kSign) - kSign);
  }
}

struct Workspace {
  alignas(64) float compensated[kMaxBlockSize];
  alignas(64) float dithers[kMaxBlockSize + 8];
  alignas(64) uint8_t bytes[kMaxBlockSize];
};

// kCount: the number of values where that is known when this is compiled, else 0.
template <int kBits, bool kSymmetric, int kCount>
inline void encode_block(const float* values, int64_t count, const Encoding& encoding,
                         int64_t block, float* error, uint8_t* codes, float* parameters,
                         Workspace& workspace) {
  const int64_t n = kCount > 0 ? kCount : count;
  const float* const p = compensated(values, n, encoding.scale, error, workspace.compensated);
  const uint32_t largest = largest_magnitude(p, n);
  float range = float_of(largest);
  float low = 0.0f;
  if constexpr (!kSymmetric) {
    int32_t least = 0x7fffffff;
    int32_t most = -0x7fffffff - 1;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t order = ordered(bits_of(p[i]));
      least = order < least ? order : least;
      most = order > most ? order : most;
    }
    low = of_ordered(least) + 0.0f;  // no zero has a sign
    if (largest < kInfinity) {
      range = of_ordered(most) - low + 0.0f;
    }
  }
  uint8_t* const into = kBits == 8 ? codes : workspace.bytes;
  constexpr float kLevels = kSymmetric ? (1 << (kBits - 1)) - 1 : (1 << kBits) - 1;
  if ((bits_of(range) & kAbsolute) >= kInfinity) {
    parameters[0] = float_of(kNaN);
    if constexpr (!kSymmetric) {
      parameters[1] = float_of(kNaN);
    }
    __builtin_memset(codes, 0, kBits == 8 ? n : (n + 1) / 2);
    return;  // with the error as it was
  }
  const Quantizer quantizer = commhook::blockwise::quantizer(range, low, kLevels);
  const float* drawn = nullptr;
  if (encoding.rounding.is_random) {
    draw_dither(encoding.rounding, block, n, workspace.dithers);
    drawn = workspace.dithers;
  }
  quantize_any<kSymmetric>(p, n, quantizer, low, kLevels, drawn, error, into);
  if constexpr (kBits == 4) {
    pack(workspace.bytes, n, codes);
  }
  parameters[0] = quantizer.step;
  if constexpr (!kSymmetric) {
    parameters[1] = low;
  }
}

template <int kBits, bool kSymmetric, bool kAdd, int kCount>
inline void decode_block(const uint8_t* __restrict codes, const float* __restrict parameters,
                         int64_t count, float* __restrict out) {
  const int64_t n = kCount > 0 ? kCount : count;
  alignas(64) uint8_t bytes[kMaxBlockSize];
  const uint8_t* from = codes;
  if constexpr (kBits == 4) {
    unpack<kSymmetric>(codes, n, bytes);
    from = bytes;
  }
  const float step = parameters[0];
  const float low = kSymmetric ? 0.0f : parameters[1];
  for (int64_t i = 0; i < n; ++i) {
    const float q =
        kSymmetric ? static_cast<float>(static_cast<int8_t>(from[i])) : static_cast<float>(from[i]);
    const float value = kSymmetric ? q * step : low + q * step;
    out[i] = kAdd ? out[i] + value : value;
  }
}

template <int kBits, bool kSymmetric, int kSize>
void encode_blocks(const float* values, int64_t count, int64_t size, const Encoding& encoding,
                   int64_t block, float* error, uint8_t* codes, float* parameters) {
  constexpr int64_t kParameters = kSymmetric ? 1 : 2;
  Workspace workspace;
  const int64_t width = kBits == 8 ? size : size / 2;
  int64_t i = 0;
  for (; i + size <= count; i += size) {
    encode_block<kBits, kSymmetric, kSize>(values + i, size, encoding, block,
                                           error == nullptr ? nullptr : error + i, codes,
                                           parameters, workspace);
    ++block;
    codes += width;
    parameters += kParameters;
  }
  if (i < count) {
    encode_block<kBits, kSymmetric, 0>(values + i, count - i, encoding, block,
                                       error == nullptr ? nullptr : error + i, codes, parameters,
                                       workspace);
  }
}

template <int kBits, bool kSymmetric>
void encode(const float* values, int64_t count, int64_t size, const Encoding& encoding,
            int64_t block, float* error, uint8_t* codes, float* parameters) {
  const auto run = size == 64    ? encode_blocks<kBits, kSymmetric, 64>
                   : size == 128 ? encode_blocks<kBits, kSymmetric, 128>
                   : size == 256 ? encode_blocks<kBits, kSymmetric, 256>
                                 : encode_blocks<kBits, kSymmetric, 0>;
  run(values, count, size, encoding, block, error, codes, parameters);
}

template <int kBits, bool kSymmetric, bool kAdd, int kSize>
void decode_blocks(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
                   float* out) {
  constexpr int64_t kParameters = kSymmetric ? 1 : 2;
  const int64_t width = kBits == 8 ? size : size / 2;
  int64_t i = 0;
  for (; i + size <= count; i += size) {
    decode_block<kBits, kSymmetric, kAdd, kSize>(codes, parameters, size, out + i);
    codes += width;
    parameters += kParameters;
  }
  if (i < count) {
    decode_block<kBits, kSymmetric, kAdd, 0>(codes, parameters, count - i, out + i);
  }
}

template <int kBits, bool kSymmetric, bool kAdd>
void decode(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
            float* out) {
  const auto run = size == 64    ? decode_blocks<kBits, kSymmetric, kAdd, 64>
                   : size == 128 ? decode_blocks<kBits, kSymmetric, kAdd, 128>
                   : size == 256 ? decode_blocks<kBits, kSymmetric, kAdd, 256>
                                 : decode_blocks<kBits, kSymmetric, kAdd, 0>;
  run(codes, parameters, count, size, out);
}

// [bits: 4, 8][min-max, symmetric]
constexpr BlockKernels kKernels[2][2] = {
    {{encode<4, false>, decode<4, false, false>, decode<4, false, true>},
     {encode<4, true>, decode<4, true, false>, decode<4, true, true>}},
    {{encode<8, false>, decode<8, false, false>, decode<8, false, true>},
     {encode<8, true>, decode<8, true, false>, decode<8, true, true>}}};
