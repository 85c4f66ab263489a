// fp8 with AVX-512: a part of fp8_kernels.inl. Handles 16 values at a time, with the arithmetic of
// fp8_math.h.

// Values rounded to 8-bit floats, in lanes of 32 bits.
struct Rounded {
  __m512i codes;    // in the low 8 bits; the others are arbitrary
  __m512 restored;  // the values of the codes
};

// round_to() and value_of() for 16 values. A magnitude is a number of units of 2^(its exponent -
// kMantissa), or of kUnit if that is more. Adding it to 2^23 units rounds it to whole units, ties
// to even; these are then in the low bits of the sum.
template <bool kE5M2>
inline __attribute__((always_inline)) Rounded round_lanes(const __m512& values) {
  using T = Traits<kE5M2>;
  constexpr int kLargerMagnitude = 3;  // selects the larger magnitude, with the sign of the first
  constexpr int kOrAnd = 0xf8;         // a | (b & c)
  // With this offset, exponents count from the least one, modulo 2^8.
  constexpr uint32_t kOffset = -(T::kLeastNormal >> T::kShift) & 0xffu;
  const __m512i sign = _mm512_set1_epi32(static_cast<int32_t>(0x80000000u));
  const __m512 least = _mm512_castsi512_ps(_mm512_set1_epi32(T::kLeastNormal));
  const __m512i exponents =
      _mm512_and_epi32(_mm512_castps_si512(_mm512_range_ps(values, least, kLargerMagnitude)),
                       _mm512_set1_epi32(static_cast<int32_t>(0xff800000u)));
  const __m512 whole = _mm512_castsi512_ps(
      _mm512_add_epi32(exponents, _mm512_set1_epi32((T::kShift << 23) + kOffset)));
  const __m512 sum = _mm512_add_ps(values, whole);
  const __m512i magnitudes =
      _mm512_add_epi32(_mm512_castps_si512(sum), _mm512_srli_epi32(exponents, T::kShift));
  const __m512i bits = _mm512_castps_si512(values);
  return {_mm512_ternarylogic_epi32(magnitudes, _mm512_srli_epi32(bits, 24),
                                    _mm512_set1_epi32(0x80), kOrAnd),
          _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
              _mm512_castps_si512(_mm512_sub_ps(sum, whole)), bits, sign, kOrAnd))};
}

// The values of codes. The codes are in lanes of 32 bits, with zeros in the other bits.
template <bool kE5M2>
inline __attribute__((always_inline)) __m512 values_of_lanes(const __m512i& codes) {
  using T = Traits<kE5M2>;
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  // Subnormal codes are at most 7, so their low four bits select the lane.
  const __m512 subnormals =
      _mm512_mul_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                    _mm512_set1_ps(T::kUnit));
  const __m512i magnitude = _mm512_and_epi32(codes, _mm512_set1_epi32(0x7f));
  const __m512 normal = _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_slli_epi32(magnitude, T::kShift), _mm512_set1_epi32(T::kRebias)));
  const auto is_subnormal =
      _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(1 << T::kMantissa));
  const __m512 value = _mm512_mask_permutexvar_ps(normal, is_subnormal, codes, subnormals);
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(_mm512_castps_si512(value), _mm512_slli_epi32(codes, 24),
                                _mm512_set1_epi32(static_cast<int32_t>(0x80000000u)), kOrAnd));
}

// Calls visit(position, mask of the lanes) for n values.
template <typename Visit>
inline __attribute__((always_inline)) void for_each_lanes(int64_t n, const Visit& visit) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    visit(i, __mmask16{0xffff});
  }
  if (i < n) {
    visit(i, static_cast<__mmask16>((1u << (n - i)) - 1u));
  }
}

// compensated() and largest_magnitude() in one pass. Returns whether it has written the buffer.
inline __attribute__((always_inline)) bool compensated_lanes(const float* values, int64_t n,
                                                             float scale, const float* error,
                                                             float* buffer, uint32_t& largest) {
  __m512i most = _mm512_setzero_si512();
  const bool is_plain = error == nullptr && scale == 1.0f;
  for_each_lanes(n, [&](int64_t i, __mmask16 lanes) __attribute__((always_inline)) {
    __m512 p = _mm512_maskz_loadu_ps(lanes, values + i);
    if (!is_plain) {
      p = _mm512_mul_ps(p, _mm512_set1_ps(scale));
      if (error != nullptr) {
        p = _mm512_add_ps(p, _mm512_maskz_loadu_ps(lanes, error + i));
      }
      _mm512_mask_storeu_ps(buffer + i, lanes, p);
    }
    const __m512i bits = _mm512_castps_si512(p);
    most = _mm512_max_epu32(most, _mm512_and_epi32(bits, _mm512_set1_epi32(kAbsolute)));
  });
  largest = _mm512_reduce_max_epu32(most);
  return !is_plain;
}

// quantize() below, for a `lift` of 1.
template <bool kE5M2, bool kError>
inline __attribute__((always_inline)) void quantize_lanes(const float* p, int64_t n,
                                                          const Quantizer& quantizer, float* error,
                                                          uint8_t* codes) {
  const __m512 factor = _mm512_set1_ps(quantizer.factor);
  const __m512 step = _mm512_set1_ps(quantizer.step);
  for_each_lanes(n, [&](int64_t i, __mmask16 lanes) __attribute__((always_inline)) {
    const __m512 values = _mm512_maskz_loadu_ps(lanes, p + i);
    const Rounded rounded = round_lanes<kE5M2>(_mm512_mul_ps(values, factor));
    _mm512_mask_cvtepi32_storeu_epi8(codes + i, lanes, rounded.codes);
    if constexpr (kError) {
      const __m512 restored = _mm512_mul_ps(rounded.restored, step);
      _mm512_mask_storeu_ps(error + i, lanes, _mm512_sub_ps(values, restored));
    }
  });
}

// ---- runs ---------------------------------------------------------------------------------------
//
// Blocks of 64, 128 and 256 values, without errors, are encoded in runs of 256 values. While one
// run is quantised, the next is described and the one after that is measured. So the loop reads
// memory without a pause, and nothing waits for the reductions and divisions.

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

inline bool fits_runs(int64_t size) { return size == 64 || size == 128 || size == 256; }

template <bool kScaled>
inline __attribute__((always_inline)) __m512 load_lanes(const float* p, float scale) {
  const __m512 lanes = _mm512_loadu_ps(p);
  return kScaled ? _mm512_mul_ps(lanes, _mm512_set1_ps(scale)) : lanes;
}

// The bits of the largest magnitudes of a part, in lanes.
template <bool kScaled>
inline __attribute__((always_inline)) __m512i measure_part(const float* p, float scale) {
  __m512i v[4];
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_and_epi32(_mm512_castps_si512(load_lanes<kScaled>(p + 16 * i, scale)),
                            _mm512_set1_epi32(kAbsolute));
  }
  return _mm512_max_epu32(_mm512_max_epu32(v[0], v[1]), _mm512_max_epu32(v[2], v[3]));
}

// The largest magnitude of each part's block.
template <int kSize>
inline __attribute__((always_inline)) __m128i largest_of_blocks(const __m512i* parts) {
  // Each step halves the lanes of a part: from 16 to 8, 4, 2 and 1.
  __m512i pairs[2];
  for (int i = 0; i < 2; ++i) {
    const __m512i& a = parts[2 * i];
    const __m512i& b = parts[2 * i + 1];
    pairs[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(a, b, kLowHalves),
                                _mm512_shuffle_i32x4(a, b, kHighHalves));
  }
  __m512i all = _mm512_max_epu32(_mm512_shuffle_i32x4(pairs[0], pairs[1], kEven),
                                 _mm512_shuffle_i32x4(pairs[0], pairs[1], kOdd));
  all =
      _mm512_max_epu32(all, _mm512_shuffle_epi32(all, static_cast<_MM_PERM_ENUM>(kSwapNeighbours)));
  all = _mm512_max_epu32(all, _mm512_shuffle_epi32(all, static_cast<_MM_PERM_ENUM>(kSwapPairs)));
  if constexpr (kSize >= 2 * kPart) {
    all = _mm512_max_epu32(all, _mm512_shuffle_i32x4(all, all, kSwapNeighbours));
  }
  if constexpr (kSize >= 4 * kPart) {
    all = _mm512_max_epu32(all, _mm512_shuffle_i32x4(all, all, kSwapPairs));
  }
  const __m512i ends = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  return _mm512_castsi512_si128(_mm512_permutexvar_epi32(ends, all));
}

// For each of a run's parts: the parameters of its block, and the block's factor.
struct Described {
  alignas(16) float steps[4];
  alignas(16) float factors[4];
};

// quantizer() for a run. Returns false if a block needs more care: its values are infinite, NaN,
// very large or very small.
template <bool kE5M2, int kSize>
inline __attribute__((always_inline)) bool describe(const __m512i* parts, Described& described) {
  const __m128 most = _mm_set1_ps(Traits<kE5M2>::kLargest);
  const __m128 range = _mm_castsi128_ps(largest_of_blocks<kSize>(parts));
  const auto is_wide = _mm_cmp_ps_mask(range, _mm_set1_ps(0x1p-100f), _CMP_GE_OQ);
  // Below this, no value is restored as an infinity.
  const auto is_moderate = _mm_cmp_ps_mask(range, _mm_set1_ps(0x1p127f), _CMP_LT_OQ);
  const auto is_zero = _mm_cmp_ps_mask(range, _mm_setzero_ps(), _CMP_EQ_OQ);
  _mm_store_ps(described.steps, _mm_div_ps(range, most));
  _mm_store_ps(described.factors, _mm_maskz_div_ps(is_wide, most, range));
  return ((is_wide | is_zero) & is_moderate) == 15;
}

// A quarter of a run's codes.
template <bool kE5M2, bool kScaled>
inline __attribute__((always_inline)) void quantize_part(const float* p, float scale, float factor,
                                                         bool is_streamed, uint8_t* codes) {
  const __m512 factors = _mm512_set1_ps(factor);
  for (int i = 0; i < kPart; i += 16) {
    const __m512 values = load_lanes<kScaled>(p + i, scale);
    const __m128i bytes =
        _mm512_cvtepi32_epi8(round_lanes<kE5M2>(_mm512_mul_ps(values, factors)).codes);
    auto* const to = reinterpret_cast<__m128i*>(codes + i);
    if (is_streamed) {
      _mm_stream_si128(to, bytes);
    } else {
      _mm_storeu_si128(to, bytes);
    }
  }
}

// Encodes runs up to the first with a block that needs more care. Returns their number.
template <bool kE5M2, bool kScaled, int kSize>
inline int64_t encode_runs(const float* p, int64_t runs, float scale, bool is_streamed,
                           uint8_t* codes, float* parameters) {
  __m512i largest[4];
  Described described[2];
  for (int part = 0; part < 4; ++part) {
    largest[part] = measure_part<kScaled>(p + part * kPart, scale);
  }
  if (!describe<kE5M2, kSize>(largest, described[0])) {
    return 0;
  }
  const float* ahead = p + (runs > 1 ? kRun : 0);
  for (int part = 0; part < 4; ++part) {
    largest[part] = measure_part<kScaled>(ahead + part * kPart, scale);
  }
  for (int64_t run = 0; run < runs; ++run) {
    const Described& own = described[run % 2];
    const bool goes_on = describe<kE5M2, kSize>(largest, described[(run + 1) % 2]);
    for (int part = 0; part < 4; part += kSize / kPart) {
      *parameters++ = own.steps[part];
    }
    ahead += run + 2 < runs ? kRun : 0;  // the last run is measured again, without use
    for (int part = 0; part < 4; ++part) {
      prefetch(ahead + part * kPart + kAheadOfRuns, kPart);
      largest[part] = measure_part<kScaled>(ahead + part * kPart, scale);
      quantize_part<kE5M2, kScaled>(p + part * kPart, scale, own.factors[part], is_streamed,
                                    codes + part * kPart);
    }
    if (!goes_on) {
      return run + 1;
    }
    p += kRun;
    codes += kRun;
  }
  return runs;
}

template <bool kE5M2, bool kAdd>
inline __attribute__((always_inline)) void decode_lanes(const uint8_t* codes, float step, int64_t n,
                                                        float* out) {
  const __m512 steps = _mm512_set1_ps(step);
  for_each_lanes(n, [&](int64_t i, __mmask16 lanes) __attribute__((always_inline)) {
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, codes + i));
    const __m512 values = _mm512_mul_ps(values_of_lanes<kE5M2>(code), steps);
    _mm512_mask_storeu_ps(
        out + i, lanes,
        kAdd ? _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, out + i), values) : values);
  });
}

// Streams whole blocks, of a multiple of 32 values, to an address at which a cache line begins.
template <bool kE5M2>
bool decode_past_caches(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
                        float* out) {
  for (int64_t i = 0; i < count; i += size) {
    const __m512 step = _mm512_set1_ps(*parameters++);
    for (int64_t j = i; j < i + size; j += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + j));
      _mm512_stream_ps(out + j,
                       _mm512_mul_ps(values_of_lanes<kE5M2>(_mm512_cvtepu8_epi32(bytes)), step));
    }
  }
  return true;
}
