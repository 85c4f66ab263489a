// fp8 with AVX-512: a part of fp8_kernels.inl. 16 values at a time, by the arithmetic of
// fp8_math.h.

// As round_to() does it, in lanes of 32 bits.
template <bool kE5M2>
inline __attribute__((always_inline)) __m512i round_lanes(const __m512& values) {
  using T = Traits<kE5M2>;
  constexpr uint32_t kHalf = (1u << (T::kShift - 1)) - 1u;
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i magnitude = _mm512_and_epi32(bits, _mm512_set1_epi32(kAbsolute));
  const __m512i even = _mm512_and_epi32(_mm512_srli_epi32(bits, T::kShift), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_add_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(kHalf - T::kRebias)), even);
  const __m512i normal = _mm512_srli_epi32(rounded, T::kShift);
  const __m512 units = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(T::kRound));
  const auto is_subnormal = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(T::kLeastNormal));
  const __m512i code = _mm512_mask_sub_epi32(normal, is_subnormal, _mm512_castps_si512(units),
                                             _mm512_castps_si512(_mm512_set1_ps(T::kRound)));
  return _mm512_ternarylogic_epi32(code, _mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80),
                                   kOrAnd);
}

// The values of codes, in lanes of 32 bits whose other bits are zero.
template <bool kE5M2>
inline __attribute__((always_inline)) __m512 values_of_lanes(const __m512i& codes) {
  using T = Traits<kE5M2>;
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  // Subnormal codes are at most 7, so that their low four bits select the lane.
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

// As compensated() and largest_magnitude() do it, in one pass. Returns whether
// it has written the buffer.
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

// As quantize() below does it, where `lift` is 1.
template <bool kE5M2, bool kError>
inline __attribute__((always_inline)) void quantize_lanes(const float* p, int64_t n,
                                                          const Quantizer& quantizer, float* error,
                                                          uint8_t* codes) {
  const __m512 factor = _mm512_set1_ps(quantizer.factor);
  const __m512 step = _mm512_set1_ps(quantizer.step);
  for_each_lanes(n, [&](int64_t i, __mmask16 lanes) __attribute__((always_inline)) {
    const __m512 values = _mm512_maskz_loadu_ps(lanes, p + i);
    const __m512i code = round_lanes<kE5M2>(_mm512_mul_ps(values, factor));
    _mm512_mask_cvtepi32_storeu_epi8(codes + i, lanes, code);
    if constexpr (kError) {
      const __m512 restored = _mm512_mul_ps(values_of_lanes<kE5M2>(code), step);
      _mm512_mask_storeu_ps(error + i, lanes, _mm512_sub_ps(values, restored));
    }
  });
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

// Writes whole blocks, of a multiple of 32 values, past the caches, to where a cache line begins.
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
