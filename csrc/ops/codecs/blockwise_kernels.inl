// The kernels of block quantisation for one instruction set: see cpu/for_each_instruction_set.h.
// Plain loops, which compilers vectorise. Maxima and minima compare the bits as integers, since
// compilers may not reorder comparisons of floats.
#include "ops/codecs/block_codec_kernels.inl"

// The least and the largest value in the order of floats; a NaN lies beyond the infinity of its
// sign. Compares bits as integers. Signed integers have the order of non-negative floats. Unsigned
// integers have the reverse order of negative floats, and place these above the others.
inline __attribute__((always_inline)) void extremes(const float* p, int64_t n, float& least,
                                                    float& most) {
  int32_t most_signed = -0x7fffffff - 1;
  uint32_t most_unsigned = 0;
  uint32_t least_unsigned = 0xffffffffu;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(p[i]);
    const auto value = static_cast<int32_t>(bits);
    most_signed = value > most_signed ? value : most_signed;
    most_unsigned = bits > most_unsigned ? bits : most_unsigned;
    least_unsigned = bits < least_unsigned ? bits : least_unsigned;
  }
  const bool has_negative = most_unsigned > kAbsolute;
  const bool has_positive = least_unsigned <= kAbsolute;
  least = float_of(has_negative ? most_unsigned : least_unsigned);
  most = float_of(has_positive ? static_cast<uint32_t>(most_signed) : least_unsigned);
}

// Random numbers of 16 bits for the values of a block. Each counter gives eight of them, for values
// at equal distances, so that vectors of counters give vectors of numbers.
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

// Whether a block's step comes from Fit, so that it is less than the largest value over the levels.
template <int kBits, bool kSymmetric, bool kDithered>
constexpr bool kFitted = kBits == 2 && kSymmetric && !kDithered;

// The integer for the value at i, in the low bits.
template <bool kClamped, bool kSymmetric, bool kDithered, bool kError>
inline __attribute__((always_inline)) uint32_t quantize(const float* __restrict p, int64_t i,
                                                        const Quantizer& quantizer, float low,
                                                        float levels,
                                                        const float* __restrict dithers,
                                                        float* __restrict error) {
  float t = kSymmetric ? p[i] * quantizer.factor : (p[i] - low) * quantizer.factor;
  if constexpr (kDithered) {
    t = t + dithers[i];
    t = t > levels ? levels : t;  // the sum may have been rounded up
  }
  if constexpr (kClamped) {  // clamps the magnitude: GCC would branch for two comparisons
    const uint32_t bits = bits_of(t);
    float magnitude = float_of(bits & kAbsolute);
    magnitude = magnitude > levels ? levels : magnitude;
    t = float_of(bits_of(magnitude) | (bits & ~kAbsolute));
  }
  const float rounded = t + kRound;
  if constexpr (kError) {
    const float restored = (rounded - kRound) * quantizer.step;
    error[i] = p[i] - (kSymmetric ? restored : low + restored);
  }
  return bits_of(rounded);
}

// The codes of n values. With four bits, a byte holds two codes: one of the block's first half in
// the low bits, one of the second half in the high bits. With two bits, it holds one of each
// quarter.
template <int kBits, bool kSymmetric, bool kDithered, bool kError>
inline __attribute__((always_inline)) void quantize_all(
    const float* __restrict p, int64_t n, const Quantizer& all, float low, float levels,
    const float* __restrict dithers, float* __restrict error, uint8_t* __restrict codes) {
  const Quantizer quantizer = all;  // a copy, which no store here can change
  const auto code = [&](int64_t i) __attribute__((always_inline)) {
    return quantize<kFitted<kBits, kSymmetric, kDithered>, kSymmetric, kDithered, kError>(
        p, i, quantizer, low, levels, dithers, error);
  };
  if constexpr (kBits == 8) {
    for (int64_t i = 0; i < n; ++i) {
      codes[i] = static_cast<uint8_t>(code(i));
    }
  } else if constexpr (kBits == 2) {
    const int64_t width = (n + 3) / 4;
    if (n == 4 * width) {
      for (int64_t i = 0; i < width; ++i) {
        codes[i] = static_cast<uint8_t>((code(i) & 3u) | (code(width + i) & 3u) << 2 |
                                        (code(2 * width + i) & 3u) << 4 | code(3 * width + i) << 6);
      }
      return;
    }
    __builtin_memset(codes, 0, static_cast<size_t>(width));
    for (int64_t i = 0; i < n; ++i) {
      uint8_t& byte = codes[i % width];
      byte = static_cast<uint8_t>(byte | (code(i) & 3u) << (i / width * 2));
    }
  } else {
    const int64_t half = (n + 1) / 2;
    if (__builtin_constant_p(n) && n == 64) {
      // Words first: from bytes, GCC would make vectors half as wide.
      uint32_t words[32];
      for (int64_t i = 0; i < 32; ++i) {
        words[i] = (code(i) & 15u) | (code(32 + i) << 4);
      }
      for (int64_t i = 0; i < 32; ++i) {
        codes[i] = static_cast<uint8_t>(words[i]);
      }
      return;
    }
    for (int64_t i = 0; i < n - half; ++i) {
      codes[i] = static_cast<uint8_t>((code(i) & 15u) | (code(half + i) << 4));
    }
    if (2 * half > n) {
      codes[half - 1] = static_cast<uint8_t>(code(half - 1) & 15u);
    }
  }
}

// The same for values so small that they must be lifted first. This is rare, so speed does not
// matter.
template <int kBits, bool kSymmetric>
inline void quantize_lifted(const float* p, int64_t n, const Quantizer& quantizer, float low,
                            float levels, const float* dithers, float* error, uint8_t* codes) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  const int64_t width = (n * kBits + 7) / 8;
  __builtin_memset(codes, 0, static_cast<size_t>(width));
  for (int64_t i = 0; i < n; ++i) {
    float t = (p[i] * quantizer.lift - quantizer.low) * quantizer.factor;
    if (dithers != nullptr) {
      t = t + dithers[i];
      t = t > levels ? levels : t;
    } else if (kFitted<kBits, kSymmetric, false>) {
      t = t > levels ? levels : t;
      t = t < -levels ? -levels : t;
    }
    const float rounded = t + kRound;
    uint8_t& byte = codes[i % width];
    byte = static_cast<uint8_t>(byte | (bits_of(rounded) & kMask) << (i / width * kBits));
    if (error != nullptr) {
      const float restored = (rounded - kRound) * quantizer.step;
      error[i] = p[i] - (kSymmetric ? restored : low + restored);
    }
  }
}

template <int kBits, bool kSymmetric>
inline __attribute__((always_inline)) void quantize_any(const float* p, int64_t n,
                                                        const Quantizer& quantizer, float low,
                                                        float levels, const float* dithers,
                                                        float* error, uint8_t* codes) {
  if (quantizer.lift != 1.0f) {
    quantize_lifted<kBits, kSymmetric>(p, n, quantizer, low, levels, dithers, error, codes);
  } else if (dithers != nullptr) {
    if (error != nullptr) {
      quantize_all<kBits, kSymmetric, true, true>(p, n, quantizer, low, levels, dithers, error,
                                                  codes);
    } else {
      quantize_all<kBits, kSymmetric, true, false>(p, n, quantizer, low, levels, dithers, error,
                                                   codes);
    }
  } else if (error != nullptr) {
    quantize_all<kBits, kSymmetric, false, true>(p, n, quantizer, low, levels, dithers, error,
                                                 codes);
  } else {
    quantize_all<kBits, kSymmetric, false, false>(p, n, quantizer, low, levels, dithers, error,
                                                  codes);
  }
}

// Small blocks are encoded in groups, step by step, so that no block waits for another's reduction
// and division. Larger groups would read memory in bursts, which is slower.
constexpr int64_t kGroupValues = 256;
constexpr int64_t kGroup = 32;

// A fitted step takes three reductions, so larger groups are faster.
template <int kBits, bool kSymmetric>
constexpr int64_t kValuesAtOnce = kBits == 2 && kSymmetric ? 4 * kGroupValues : kGroupValues;

// The prefetch distance in values. Half and twice this were slower.
constexpr int64_t kAhead = 512;

struct Workspace {
  alignas(64) float compensated[kMaxBlockSize];
  alignas(64) float dithers[kMaxBlockSize + 8];
  float range[kGroup] = {};
  float fitted[kGroup] = {};  // the range that gives the step
  float low[kGroup] = {};
  float step[kGroup];
  float lifted_low[kGroup];
  float lift[kGroup];
  float factor[kGroup];
};

template <int kBits, bool kSymmetric>
constexpr float levels() {
  return kSymmetric ? (1 << (kBits - 1)) - 1 : (1 << kBits) - 1;
}

// Compiled once for all callers. GCC would make a copy for each, which is slower with errors.
#ifdef __clang__
#define COMMHOOK_ONCE __attribute__((noinline))
#else
#define COMMHOOK_ONCE __attribute__((noinline, noclone))
#endif

#if COMMHOOK_VECTOR_BYTES == 64
#include "ops/codecs/blockwise_avx512.inl"
#endif

// Computes what is sent of a block's extremes: low, which is never -0, and the range, which is
// infinite or NaN if a value is.
template <bool kSymmetric>
inline __attribute__((always_inline)) void measure(const float* p, int64_t n, float& low,
                                                   float& range) {
  if constexpr (kSymmetric) {
    low = 0.0f;
    range = float_of(largest_magnitude(p, n));
  } else {
    float most;
    extremes(p, n, low, most);
    low = low + 0.0f;
    range = most - low + 0.0f;
  }
}

// The step of a block with the largest magnitude `range`; see Fit in blockwise_math.h.
inline __attribute__((always_inline)) float fitted_step_of(const float* __restrict p, int64_t n,
                                                           float range) {
  const Fit fit = fit_to(range);
  const float factor = fit.factor;
  uint32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += in_units(p[i], factor) - kWholeBits;
  }
  const auto limit = static_cast<int32_t>(threshold(sum, static_cast<int32_t>(n)));
  uint32_t larger = 0;
  uint32_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = in_units(p[i], factor);
    const uint32_t mask = static_cast<int32_t>(bits) > limit ? 0xffffffffu : 0u;
    larger += (bits - kWholeBits) & mask;
    count -= mask;
  }
  return fitted_step(fit, range, larger, count);
}

// Encodes the blocks of n values, at most kGroup blocks. All have `size` values, except the last.
template <int kBits, bool kSymmetric, int kSize>
inline __attribute__((always_inline)) void encode_group(const float* values, int64_t n,
                                                        int64_t size, const Encoding& encoding,
                                                        int64_t block, float* error, uint8_t* codes,
                                                        float* parameters, Workspace& workspace) {
  constexpr float kLevels = levels<kBits, kSymmetric>();
  constexpr int64_t kParameters = kSymmetric ? 1 : 2;
  const float* const p = compensated(values, n, encoding.scale, error, workspace.compensated);
  const int64_t whole = n / size;
  const int64_t rest = n - whole * size;
  for (int64_t b = 0; b < whole; ++b) {
    measure<kSymmetric>(p + b * size, size, workspace.low[b], workspace.range[b]);
  }
  if (rest > 0) {
    measure<kSymmetric>(p + whole * size, rest, workspace.low[whole], workspace.range[whole]);
  }
  const int64_t blocks = rest > 0 ? whole + 1 : whole;
  const float* ranges = workspace.range;
  if constexpr (kBits == 2 && kSymmetric) {
    if (!encoding.rounding.is_random) {
      for (int64_t b = 0; b < blocks; ++b) {
        const float range = workspace.range[b];
        workspace.fitted[b] = (bits_of(range) & kAbsolute) >= kInfinity
                                  ? 0.0f
                                  : fitted_step_of(p + b * size, b < whole ? size : rest, range);
      }
      ranges = workspace.fitted;
    }
  }
  // Computes all of a group, so that the number is constant and the divisions are vectorised.
  constexpr int64_t kBlocks = kSize > 0 ? kValuesAtOnce<kBits, kSymmetric> / kSize : 0;
  for (int64_t b = 0; b < (kBlocks > 1 ? kBlocks : blocks); ++b) {
    const Quantizer quantizer =
        commhook::blockwise::quantizer(ranges[b], workspace.low[b], kLevels);
    workspace.step[b] = quantizer.step;
    workspace.lifted_low[b] = quantizer.low;
    workspace.lift[b] = quantizer.lift;
    workspace.factor[b] = quantizer.factor;
  }
  const auto encode_block = [&](int64_t b, int64_t count) __attribute__((always_inline)) {
    if (error == nullptr) {  // with an error, memory has no bandwidth left
      prefetch(values + b * size + kAhead, size);
    }
    uint8_t* const to = codes + b * (size * kBits / 8);
    float* const described = parameters + b * kParameters;
    if ((bits_of(workspace.range[b]) & kAbsolute) >= kInfinity) {
      for (int64_t i = 0; i < kParameters; ++i) {
        described[i] = float_of(kNaN);
      }
      __builtin_memset(to, 0, (count * kBits + 7) / 8);
      return;  // the error stays as it was
    }
    const Quantizer quantizer = {workspace.step[b], workspace.lifted_low[b], workspace.lift[b],
                                 workspace.factor[b]};
    const float* drawn = nullptr;
    if (encoding.rounding.is_random) {
      draw_dither(encoding.rounding, block + b, count, workspace.dithers);
      drawn = workspace.dithers;
    }
    quantize_any<kBits, kSymmetric>(p + b * size, count, quantizer, workspace.low[b], kLevels,
                                    drawn, error == nullptr ? nullptr : error + b * size, to);
    described[0] = quantizer.step;
    if constexpr (!kSymmetric) {
      described[1] = workspace.low[b];
    }
  };
  for (int64_t b = 0; b < whole; ++b) {
    encode_block(b, size);
  }
  if (rest > 0) {
    encode_block(whole, rest);
  }
}

template <int kBits, bool kSymmetric, bool kAdd, int kCount>
inline void decode_block(const uint8_t* __restrict codes, const float* __restrict parameters,
                         int64_t count, float* __restrict out) {
  const int64_t n = kCount > 0 ? kCount : count;
  const float step = parameters[0];
  const float low = kSymmetric ? 0.0f : parameters[1];
  const auto put = [&](int64_t i, int32_t q) __attribute__((always_inline)) {
    const float restored = static_cast<float>(q) * step;
    const float value = kSymmetric ? restored : low + restored;
    out[i] = kAdd ? out[i] + value : value;
  };
  if constexpr (kBits == 8) {
    for (int64_t i = 0; i < n; ++i) {
      put(i, kSymmetric ? static_cast<int32_t>(static_cast<int8_t>(codes[i])) : codes[i]);
    }
  } else {
    constexpr int32_t kMask = (1 << kBits) - 1;
    constexpr int32_t kSign = kSymmetric ? 1 << (kBits - 1) : 0;
    constexpr int64_t kParts = 8 / kBits;
    const int64_t width = (n + kParts - 1) / kParts;
    for (int64_t k = 0; k < kParts; ++k) {
      const int64_t first = k * width;
      const int64_t count = n - first < width ? n - first : width;
      for (int64_t i = 0; i < count; ++i) {
        put(first + i, ((codes[i] >> (k * kBits) & kMask) ^ kSign) - kSign);
      }
    }
  }
}

#if COMMHOOK_VECTOR_BYTES != 64
// This instruction set has no kernel that decodes past the caches.
template <int kBits, bool kSymmetric>
bool decode_past_caches(const uint8_t*, const float*, int64_t, int64_t, float*) {
  return false;
}
#endif

template <int kBits, bool kSymmetric, int kSize>
COMMHOOK_ONCE void encode_blocks(const float* values, int64_t count, int64_t size_of_block,
                                 const Encoding& encoding, int64_t block, float* error,
                                 uint8_t* codes, float* parameters) {
  constexpr int64_t kParameters = kSymmetric ? 1 : 2;
  Workspace workspace;
  const int64_t size = kSize > 0 ? kSize : size_of_block;
  constexpr int64_t kValues = kValuesAtOnce<kBits, kSymmetric>;
  const int64_t group = size > kValues ? 1 : size * kGroup > kValues ? kValues / size : kGroup;
  const int64_t step = group * size;
  const int64_t bytes = step * kBits / 8;
  for (int64_t i = 0; i < count; i += step) {
    encode_group<kBits, kSymmetric, kSize>(values + i, count - i < step ? count - i : step, size,
                                           encoding, block, error == nullptr ? nullptr : error + i,
                                           codes, parameters, workspace);
    block += group;
    codes += bytes;
    parameters += group * kParameters;
  }
}

// Whether blocks without errors are encoded in runs.
bool streams(int64_t size, const Encoding& encoding) {
  return COMMHOOK_VECTOR_BYTES == 64 && (size == 64 || size == 128 || size == 256) &&
         !encoding.rounding.is_random;
}

template <int kBits, bool kSymmetric, int kSize>
void encode_any(const float* values, int64_t count, int64_t size, const Encoding& encoding,
                int64_t block, float* error, uint8_t* codes, float* parameters) {
#if COMMHOOK_VECTOR_BYTES == 64
  if constexpr (kSize > 0 && kBits >= 4) {
    // Short runs, such as those of converted tensors, do not repay the start.
    if (error == nullptr && streams(size, encoding) && count >= 4 * kRun) {
      const auto encode_plain = encoding.scale == 1.0f
                                    ? encode_runs<kBits, kSymmetric, false, kSize>
                                    : encode_runs<kBits, kSymmetric, true, kSize>;
      for (int64_t rest = count; rest > 0;) {
        const int64_t runs = rest / kRun;
        const int64_t done = runs == 0 ? 0
                                       : encode_plain(values, runs, encoding.scale,
                                                      encoding.is_streamed, codes, parameters);
        const auto advance = [&](int64_t n) {
          values += n;
          codes += n * kBits / 8;
          parameters += n / kSize * (kSymmetric ? 1 : 2);
          rest -= n;
        };
        advance(done * kRun);
        if (rest > 0) {  // a run with a block that needs more care, or an incomplete run
          const int64_t n = rest < kRun ? rest : kRun;
          encode_blocks<kBits, kSymmetric, kSize>(values, n, size, encoding, 0, nullptr, codes,
                                                  parameters);
          advance(n);
        }
      }
      return;
    }
  }
  if constexpr (kBits == 2 && kSymmetric) {
    const int64_t step = kFour * size;
    if (fits_four(size) && !encoding.rounding.is_random) {
      for (; count >= step; count -= step) {
        if (!encode_four<kSize>(values, size, encoding.scale, error, codes, parameters)) {
          encode_blocks<kBits, kSymmetric, kSize>(values, step, size, encoding, 0, error, codes,
                                                  parameters);
        }
        values += step;
        error = error == nullptr ? nullptr : error + step;
        codes += step / 4;
        parameters += kFour;
      }
      block = 0;  // only random numbers depend on it
    }
  }
#endif
  encode_blocks<kBits, kSymmetric, kSize>(values, count, size, encoding, block, error, codes,
                                          parameters);
}

template <int kBits, bool kSymmetric>
void encode(const float* values, int64_t count, int64_t size, const Encoding& encoding,
            int64_t block, float* error, uint8_t* codes, float* parameters) {
  const auto run = size == 64    ? encode_any<kBits, kSymmetric, 64>
                   : size == 128 ? encode_any<kBits, kSymmetric, 128>
                   : size == 256 ? encode_any<kBits, kSymmetric, 256>
                                 : encode_any<kBits, kSymmetric, 0>;
  run(values, count, size, encoding, block, error, codes, parameters);
}

template <int kBits, bool kSymmetric, bool kAdd, int kSize>
void decode_blocks(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
                   float* out) {
  constexpr int64_t kParameters = kSymmetric ? 1 : 2;
  const int64_t width = size * kBits / 8;
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

// [bits: 2, 4, 8][min-max, symmetric]
constexpr BlockKernels kKernels[3][2] = {
    {{encode<2, false>, decode<2, false, false>, decode<2, false, true>, nullptr,
      decode_past_caches<2, false>},
     {encode<2, true>, decode<2, true, false>, decode<2, true, true>, nullptr,
      decode_past_caches<2, true>}},
    {{encode<4, false>, decode<4, false, false>, decode<4, false, true>, streams,
      decode_past_caches<4, false>},
     {encode<4, true>, decode<4, true, false>, decode<4, true, true>, streams,
      decode_past_caches<4, true>}},
    {{encode<8, false>, decode<8, false, false>, decode<8, false, true>, streams,
      decode_past_caches<8, false>},
     {encode<8, true>, decode<8, true, false>, decode<8, true, true>, streams,
      decode_past_caches<8, true>}}};

#undef COMMHOOK_ONCE
