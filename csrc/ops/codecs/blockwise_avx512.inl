// Block quantisation with AVX-512: a part of blockwise_kernels.inl.
//
// Blocks of 64, 128 and 256 values, without random numbers and errors, are encoded in runs of 256
// values. While one run is quantised, the next is described and the one after that is measured. So
// the loop reads memory without a pause, and nothing waits for the divisions.

constexpr int kRun = 256;
constexpr int kPart = kRun / 4;

// Controls of a shuffle of four elements, two bits for each element. The elements come from one
// vector, or the first two from one and the last two from another.
constexpr int kLowHalves = 0x44;       // 0 1 | 0 1
constexpr int kHighHalves = 0xee;      // 2 3 | 2 3
constexpr int kEven = 0x88;            // 0 2 | 0 2
constexpr int kOdd = 0xdd;             // 1 3 | 1 3
constexpr int kSwapNeighbours = 0xb1;  // 1 0 3 2
constexpr int kSwapPairs = 0x4e;       // 2 3 0 1

template <bool kLargest>
inline __attribute__((always_inline)) __m512 extreme(const __m512& a, const __m512& b) {
  return kLargest ? _mm512_max_ps(a, b) : _mm512_min_ps(a, b);
}

// Reduces four parts. A block that has several parts appears once for each of them.
template <bool kLargest, int kSize>
inline __attribute__((always_inline)) __m128 extremes_of_blocks(const __m512* parts) {
  // Each step halves the lanes of a part: from 16 to 8, 4, 2 and 1.
  __m512 pairs[2];
  for (int i = 0; i < 2; ++i) {
    const __m512& a = parts[2 * i];
    const __m512& b = parts[2 * i + 1];
    pairs[i] = extreme<kLargest>(_mm512_shuffle_f32x4(a, b, kLowHalves),
                                 _mm512_shuffle_f32x4(a, b, kHighHalves));
  }
  __m512 all = extreme<kLargest>(_mm512_shuffle_f32x4(pairs[0], pairs[1], kEven),
                                 _mm512_shuffle_f32x4(pairs[0], pairs[1], kOdd));
  all = extreme<kLargest>(all, _mm512_permute_ps(all, kSwapNeighbours));
  all = extreme<kLargest>(all, _mm512_permute_ps(all, kSwapPairs));
  if constexpr (kSize >= 2 * kPart) {
    all = extreme<kLargest>(all, _mm512_shuffle_f32x4(all, all, kSwapNeighbours));
  }
  if constexpr (kSize >= 4 * kPart) {
    all = extreme<kLargest>(all, _mm512_shuffle_f32x4(all, all, kSwapPairs));
  }
  const __m512i ends = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  return _mm512_castps512_ps128(_mm512_permutexvar_ps(ends, all));
}

template <bool kScaled>
inline __attribute__((always_inline)) __m512 load_lanes(const float* p, float scale) {
  const __m512 lanes = _mm512_loadu_ps(p);
  return kScaled ? _mm512_mul_ps(lanes, _mm512_set1_ps(scale)) : lanes;
}

// The extremes of a run's parts, in lanes.
struct Extremes {
  __m512 most[4];
  __m512 least[4];
  __mmask16 is_nan;
};

// Symmetric blocks use this too: measuring only their largest magnitude would take as long.
template <bool kScaled>
inline __attribute__((always_inline)) void measure_part(const float* p, float scale,
                                                        Extremes& extremes, int part) {
  __m512 v[4];
  for (int i = 0; i < 4; ++i) {
    v[i] = load_lanes<kScaled>(p + 16 * i, scale);
  }
  extremes.most[part] = extreme<true>(extreme<true>(v[0], v[1]), extreme<true>(v[2], v[3]));
  extremes.least[part] = extreme<false>(extreme<false>(v[0], v[1]), extreme<false>(v[2], v[3]));
  extremes.is_nan |= _mm512_cmp_ps_mask(v[0], v[1], _CMP_UNORD_Q);
  extremes.is_nan |= _mm512_cmp_ps_mask(v[2], v[3], _CMP_UNORD_Q);
}

// quantize() for 16 values.
template <bool kSymmetric, bool kScaled>
inline __attribute__((always_inline)) __m512i quantize_lanes(const float* p, float scale,
                                                             const __m512& low,
                                                             const __m512& factor) {
  __m512 t = load_lanes<kScaled>(p, scale);
  t = kSymmetric ? t : _mm512_sub_ps(t, low);
  return _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(t, factor), _mm512_set1_ps(kRound)));
}

// The low halves of the 32 words of a and b.
inline __attribute__((always_inline)) __m512i low_halves(const __m512i& a, const __m512i& b) {
  alignas(64) static constexpr int16_t kLow[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                   22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                   44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  return _mm512_permutex2var_epi16(a, _mm512_load_si512(kLow), b);
}

// A quarter of a run's codes. With four bits, these are codes of 32 values of a block's first half
// and of 32 of its second.
template <int kBits, bool kSymmetric, bool kScaled, int kSize>
inline __attribute__((always_inline)) void quantize_part(const float* run, float scale, int part,
                                                         const __m512& low, const __m512& factor,
                                                         bool is_streamed, uint8_t* codes) {
  constexpr int kParts = kSize / kPart;
  constexpr int kHalf = kSize / 2;
  const float* const p =
      run + (kBits == 8 ? part * kPart : part / kParts * kSize + part % kParts * (kPart / 2));
  // The codes of 32 values, in the low bytes.
  const auto quantized = [&](const float* from) __attribute__((always_inline)) {
    return low_halves(quantize_lanes<kSymmetric, kScaled>(from, scale, low, factor),
                      quantize_lanes<kSymmetric, kScaled>(from + 16, scale, low, factor));
  };
  const auto write = [&](const __m512i& halves, uint8_t* to) __attribute__((always_inline)) {
    const __m256i bytes = _mm512_cvtepi16_epi8(halves);
    if (is_streamed) {  // in units of 16, as messages are aligned; 32 at once are no faster
      auto* const lanes = reinterpret_cast<__m128i*>(to);
      _mm_stream_si128(lanes, _mm256_castsi256_si128(bytes));
      _mm_stream_si128(lanes + 1, _mm256_extracti128_si256(bytes, 1));
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
    }
  };
  codes += part * (kBits * kPart / 8);
  if constexpr (kBits == 4) {
    constexpr int kAndOr = 0xea;  // (a & b) | c
    const __m512i high = _mm512_slli_epi16(quantized(p + kHalf), 4);
    write(_mm512_ternarylogic_epi32(quantized(p), _mm512_set1_epi16(15), high, kAndOr), codes);
  } else {
    write(quantized(p), codes);
    write(quantized(p + 32), codes + 32);
  }
}

// For each of a run's parts: the parameters of its block, and the block's factor.
struct Described {
  alignas(16) float lows[4];
  alignas(16) float steps[4];
  alignas(16) float factors[4];
};

// Returns false if a block needs more care: its values are infinite, NaN, very large or very small.
template <int kBits, bool kSymmetric, int kSize>
inline __attribute__((always_inline)) bool describe(const Extremes& extremes,
                                                    Described& described) {
  const __m128 zero = _mm_setzero_ps();
  const __m128 count = _mm_set1_ps(levels<kBits, kSymmetric>());
  const __m128 most = extremes_of_blocks<true, kSize>(extremes.most);
  const __m128 least = extremes_of_blocks<false, kSize>(extremes.least);
  const __m128 low = kSymmetric ? zero : _mm_add_ps(least, zero);
  const __m128 range = kSymmetric ? _mm_max_ps(most, _mm_sub_ps(zero, least))
                                  : _mm_add_ps(_mm_sub_ps(most, low), zero);
  const auto is_wide = _mm_cmp_ps_mask(range, _mm_set1_ps(0x1p-100f), _CMP_GE_OQ);
  // Below this, no q is restored as an infinity.
  const auto is_moderate =
      _mm_cmp_ps_mask(_mm_max_ps(range, most), _mm_set1_ps(0x1p127f), _CMP_LT_OQ);
  const auto is_plain = (is_wide | _mm_cmp_ps_mask(range, zero, _CMP_EQ_OQ)) & is_moderate;
  _mm_store_ps(described.lows, low);
  _mm_store_ps(described.steps, _mm_div_ps(range, count));
  // 0 where all values are equal.
  _mm_store_ps(described.factors, _mm_maskz_div_ps(is_wide, count, range));
  return extremes.is_nan == 0 && is_plain == 15;
}

// Encodes runs up to the first with a block that needs more care. Returns their number.
template <int kBits, bool kSymmetric, bool kScaled, int kSize>
inline int64_t encode_runs(const float* p, int64_t runs, float scale, bool is_streamed,
                           uint8_t* codes, float* parameters) {
  Extremes extremes;
  extremes.is_nan = 0;
  const auto measure_at = [&](const float* run, int part) __attribute__((always_inline)) {
    measure_part<kScaled>(run + part * kPart, scale, extremes, part);
  };
  Described described[2];
  for (int part = 0; part < 4; ++part) {
    measure_at(p, part);
  }
  if (!describe<kBits, kSymmetric, kSize>(extremes, described[0])) {
    return 0;
  }
  const float* ahead = p + (runs > 1 ? kRun : 0);
  for (int part = 0; part < 4; ++part) {
    measure_at(ahead, part);
  }
  for (int64_t run = 0; run < runs; ++run) {
    const Described& own = described[run % 2];
    const bool goes_on = describe<kBits, kSymmetric, kSize>(extremes, described[(run + 1) % 2]);
    for (int part = 0; part < 4; part += kSize / kPart) {
      *parameters++ = own.steps[part];
      if constexpr (!kSymmetric) {
        *parameters++ = own.lows[part];
      }
    }
    ahead += run + 2 < runs ? kRun : 0;  // the last run is measured again, without use
    for (int part = 0; part < 4; ++part) {
      prefetch(ahead + part * kPart + kAheadOfRuns, kPart);
      measure_at(ahead, part);
      quantize_part<kBits, kSymmetric, kScaled, kSize>(
          p, scale, part, _mm512_set1_ps(own.lows[part]), _mm512_set1_ps(own.factors[part]),
          is_streamed, codes);
    }
    if (!goes_on) {
      return run + 1;
    }
    p += kRun;
    codes += kRun * kBits / 8;
  }
  return runs;
}

// ---- two bits, symmetric, rounded to the nearest -----------------------------------------------
//
// A block's step takes three reductions, one after the other. So four blocks share them.

constexpr int kFour = 4;

template <bool kSum>
inline __attribute__((always_inline)) __m512i combined(const __m512i& a, const __m512i& b) {
  return kSum ? _mm512_add_epi32(a, b) : _mm512_max_epi32(a, b);
}

// The sum, or the largest value, of each of four vectors.
template <bool kSum>
inline __attribute__((always_inline)) __m128i reduced(const __m512i* rows) {
  __m512i pairs[2];
  for (int i = 0; i < 2; ++i) {
    const __m512i& a = rows[2 * i];
    const __m512i& b = rows[2 * i + 1];
    pairs[i] = combined<kSum>(_mm512_shuffle_i32x4(a, b, kLowHalves),
                              _mm512_shuffle_i32x4(a, b, kHighHalves));
  }
  __m512i all = combined<kSum>(_mm512_shuffle_i32x4(pairs[0], pairs[1], kEven),
                               _mm512_shuffle_i32x4(pairs[0], pairs[1], kOdd));
  all = combined<kSum>(all, _mm512_shuffle_epi32(all, static_cast<_MM_PERM_ENUM>(kSwapNeighbours)));
  all = combined<kSum>(all, _mm512_shuffle_epi32(all, static_cast<_MM_PERM_ENUM>(kSwapPairs)));
  const __m512i ends = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  return _mm512_castsi512_si128(_mm512_permutexvar_epi32(ends, all));
}

inline __attribute__((always_inline)) __m512 magnitudes(const float* p) {
  return _mm512_abs_ps(_mm512_loadu_ps(p));
}

// in_units() for 16 values.
inline __attribute__((always_inline)) __m512i units(const float* p, const __m512& factor) {
  return _mm512_cvtps_epi32(_mm512_mul_ps(magnitudes(p), factor));
}

// The steps of four blocks, and the factors for their values.
struct FittedSteps {
  alignas(16) float steps[kFour];
  alignas(16) float factors[kFour];
};

// fitted_step() and quantizer() for four blocks. Returns false if a block needs more care: its
// values are infinite, NaN or very small.
// values: the source of p; the values after them are prefetched.
template <int kSize>
inline __attribute__((always_inline)) bool fit_four(const float* p, const float* values,
                                                    int64_t size_of_block, FittedSteps& fitted) {
  const int64_t size = kSize > 0 ? kSize : size_of_block;
  __m512i rows[kFour];
  for (int b = 0; b < kFour; ++b) {
    rows[b] = _mm512_setzero_si512();
    for (int64_t i = 0; i < size; i += 16) {
      rows[b] = combined<false>(rows[b], _mm512_castps_si512(magnitudes(p + b * size + i)));
    }
  }
  const __m128 range = _mm_castsi128_ps(reduced<false>(rows));
  const __m128 zero = _mm_setzero_ps();
  const auto is_zero = _mm_cmp_ps_mask(range, zero, _CMP_EQ_OQ);
  // Then the step is normal: it is at least some thousandth of the range.
  const auto is_wide = _mm_cmp_ps_mask(range, _mm_set1_ps(0x1p-80f), _CMP_GE_OQ) &
                       _mm_cmp_ps_mask(range, _mm_set1_ps(kLargestFinite), _CMP_LE_OQ);
  if ((is_zero | is_wide) != 15) {
    return false;
  }
  alignas(16) float scales[kFour];
  _mm_store_ps(scales, _mm_maskz_div_ps(is_wide, _mm_set1_ps(kUnits), range));
  for (int b = 0; b < kFour; ++b) {
    const __m512 scale = _mm512_set1_ps(scales[b]);
    rows[b] = _mm512_setzero_si512();
    for (int64_t i = 0; i < size; i += 16) {
      rows[b] = combined<true>(rows[b], units(p + b * size + i, scale));
      __builtin_prefetch(values + (kFour + b) * size + i);
    }
  }
  const __m128 sum = _mm_cvtepi32_ps(reduced<true>(rows));
  const __m128 mean =
      _mm_div_ps(_mm_mul_ps(sum, _mm_set1_ps(kThreshold)), _mm_set1_ps(static_cast<float>(size)));
  alignas(16) int32_t limits[kFour];
  _mm_store_si128(reinterpret_cast<__m128i*>(limits), _mm_cvtps_epi32(mean));
  __m512i counts[kFour];
  for (int b = 0; b < kFour; ++b) {
    const __m512 scale = _mm512_set1_ps(scales[b]);
    const __m512i limit = _mm512_set1_epi32(limits[b]);
    rows[b] = _mm512_setzero_si512();
    counts[b] = _mm512_setzero_si512();
    for (int64_t i = 0; i < size; i += 16) {
      const __m512i own = units(p + b * size + i, scale);
      const __mmask16 is_larger = _mm512_cmpgt_epi32_mask(own, limit);
      rows[b] = _mm512_mask_add_epi32(rows[b], is_larger, rows[b], own);
      counts[b] = _mm512_mask_add_epi32(counts[b], is_larger, counts[b], _mm512_set1_epi32(1));
    }
  }
  const __m128 larger = _mm_cvtepi32_ps(reduced<true>(rows));
  const __m128 count = _mm_cvtepi32_ps(reduced<true>(counts));
  const __m128 of_range = _mm_mul_ps(_mm_div_ps(larger, count), _mm_set1_ps(1.0f / kUnits));
  // The minimum is the range if the other operand is NaN.
  const __m128 step = _mm_min_ps(_mm_mul_ps(range, of_range), range);
  _mm_store_ps(fitted.steps, step);
  _mm_store_ps(fitted.factors, _mm_maskz_div_ps(is_wide, _mm_set1_ps(1.0f), step));
  return true;
}

// quantize() for 16 values.
template <bool kError>
inline __attribute__((always_inline)) __m512i quantize_fitted(const float* p, const __m512& step,
                                                              const __m512& factor, float* error) {
  const __m512 values = _mm512_loadu_ps(p);
  const __m512 t = _mm512_mul_ps(values, factor);
  const __m512 clamped =
      _mm512_max_ps(_mm512_min_ps(t, _mm512_set1_ps(1.0f)), _mm512_set1_ps(-1.0f));
  const __m512i q = _mm512_cvtps_epi32(clamped);
  if constexpr (kError) {
    const __m512 restored = _mm512_mul_ps(_mm512_cvtepi32_ps(q), step);
    _mm512_storeu_ps(error, _mm512_sub_ps(values, restored));
  }
  return q;
}

template <bool kError>
inline __attribute__((always_inline)) void quantize_fitted_block(const float* p, int64_t size,
                                                                 float step, float factor,
                                                                 float* error, uint8_t* codes) {
  constexpr int kAndOr = 0xea;  // (a & b) | c
  const int64_t width = size / 4;
  const __m512i mask = _mm512_set1_epi32(3);
  const __m512 steps = _mm512_set1_ps(step);
  const __m512 factors = _mm512_set1_ps(factor);
  for (int64_t i = 0; i < width; i += 16) {
    const auto part = [&](int64_t k) __attribute__((always_inline)) {
      const int64_t first = k * width + i;
      return quantize_fitted<kError>(p + first, steps, factors, kError ? error + first : nullptr);
    };
    const __m512i upper =
        _mm512_ternarylogic_epi32(part(2), mask, _mm512_slli_epi32(part(3), 2), kAndOr);
    const __m512i lower = _mm512_ternarylogic_epi32(
        part(0), mask, _mm512_slli_epi32(_mm512_and_si512(part(1), mask), 2), kAndOr);
    const __m512i words = _mm512_or_si512(lower, _mm512_slli_epi32(upper, 4));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(words));
  }
}

// Whether four blocks of this size are encoded together.
inline bool fits_four(int64_t size) { return size % 64 == 0 && kFour * size <= kMaxBlockSize; }

// Encodes four blocks. Returns false, and does nothing, if one needs more care.
template <int kSize>
COMMHOOK_ONCE bool encode_four(const float* values, int64_t size_of_block, float scale,
                               float* error, uint8_t* codes, float* parameters) {
  const int64_t size = kSize > 0 ? kSize : size_of_block;
  alignas(64) float buffer[kMaxBlockSize];
  const float* const p = compensated(values, kFour * size, scale, error, buffer);
  FittedSteps fitted;
  if (!fit_four<kSize>(p, values, size, fitted)) {
    return false;
  }
  for (int b = 0; b < kFour; ++b) {
    const int64_t first = b * size;
    uint8_t* const to = codes + first / 4;
    if (error == nullptr) {
      quantize_fitted_block<false>(p + first, size, fitted.steps[b], fitted.factors[b], nullptr,
                                   to);
    } else {
      quantize_fitted_block<true>(p + first, size, fitted.steps[b], fitted.factors[b],
                                  error + first, to);
    }
    parameters[b] = fitted.steps[b];
  }
  return true;
}

// Streams whole blocks, of a multiple of 32 values, to an address at which a cache line begins.
template <int kBits, bool kSymmetric>
bool decode_past_caches(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
                        float* out) {
  constexpr int64_t kParameters = kSymmetric ? 1 : 2;
  constexpr int kParts = 8 / kBits;
  if (size % (16 * kParts) != 0) {
    return false;
  }
  const __m128i sign = _mm_set1_epi8(kSymmetric ? 1 << (kBits - 1) : 0);
  for (int64_t i = 0; i < count; i += size) {
    const __m512 step = _mm512_set1_ps(parameters[0]);
    const __m512 low = _mm512_set1_ps(kSymmetric ? 0.0f : parameters[1]);
    const auto put = [&](float* to, const __m128i& bytes) __attribute__((always_inline)) {
      const __m512i words = kSymmetric ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
      const __m512 restored = _mm512_mul_ps(_mm512_cvtepi32_ps(words), step);
      _mm512_stream_ps(to, kSymmetric ? restored : _mm512_add_ps(low, restored));
    };
    const auto low_bits = [&](const __m128i& bytes) __attribute__((always_inline)) {
      const __m128i own = _mm_and_si128(bytes, _mm_set1_epi8((1 << kBits) - 1));
      return kSymmetric ? _mm_sub_epi8(_mm_xor_si128(own, sign), sign) : own;
    };
    const auto* const from = reinterpret_cast<const __m128i*>(codes);
    for (int64_t j = 0; j < size * kBits / 8; j += 16) {
      const __m128i bytes = _mm_loadu_si128(from + j / 16);
      if constexpr (kBits == 8) {
        put(out + j, bytes);
      } else {
        for (int k = 0; k < kParts; ++k) {
          put(out + size / kParts * k + j, low_bits(_mm_srli_epi16(bytes, k * kBits)));
        }
      }
    }
    out += size;
    codes += size * kBits / 8;
    parameters += kParameters;
  }
  return true;
}
