// The kernels of fp8 for one instruction set: see cpu/for_each_instruction_set.h. Plain loops,
// which compilers turn into vectors.
#include "ops/codecs/block_codec_kernels.inl"

template <bool kE5M2, bool kError>
inline void quantize(const float* __restrict p, int64_t n, const Quantizer& quantizer,
                     float* __restrict error, uint8_t* __restrict codes) {
  constexpr float kLargest = Traits<kE5M2>::kLargest;
  const float lift = quantizer.lift;
  const float factor = quantizer.factor;
  const float step = quantizer.step;
  for (int64_t i = 0; i < n; ++i) {
    float scaled = p[i] * lift * factor;
    scaled = scaled > kLargest ? kLargest : scaled;
    scaled = scaled < -kLargest ? -kLargest : scaled;
    codes[i] = round_to<kE5M2>(scaled);
  }
  if constexpr (kError) {
    for (int64_t i = 0; i < n; ++i) {
      error[i] = p[i] - value_of<kE5M2>(codes[i]) * step;
    }
  }
}

template <bool kE5M2>
inline void encode_block(const float* values, int64_t n, const Encoding& encoding, float* error,
                         uint8_t* codes, float* parameters) {
  alignas(64) float buffer[kMaxBlockSize];
  const float* const p = compensated(values, n, encoding.scale, error, buffer);
  const uint32_t largest = largest_magnitude(p, n);
  if (largest >= kInfinity) {
    parameters[0] = float_of(kNaN);
    __builtin_memset(codes, 0, n);
    return;  // with the error as it was
  }
  const Quantizer quantizer =
      commhook::blockwise::quantizer(float_of(largest), 0.0f, Traits<kE5M2>::kLargest);
  parameters[0] = quantizer.step;
  if (error != nullptr) {
    quantize<kE5M2, true>(p, n, quantizer, error, codes);
  } else {
    quantize<kE5M2, false>(p, n, quantizer, error, codes);
  }
}

template <bool kE5M2>
void encode(const float* values, int64_t count, int64_t size, const Encoding& encoding, int64_t,
            float* error, uint8_t* codes, float* parameters) {
  for (int64_t i = 0; i < count; i += size) {
    encode_block<kE5M2>(values + i, count - i < size ? count - i : size, encoding,
                        error == nullptr ? nullptr : error + i, codes + i, parameters);
    ++parameters;
  }
}

template <bool kE5M2, bool kAdd>
inline void decode_block(const uint8_t* __restrict codes, float step, int64_t n,
                         float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = value_of<kE5M2>(codes[i]) * step;
    out[i] = kAdd ? out[i] + value : value;
  }
}

template <bool kE5M2, bool kAdd>
void decode(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
            float* out) {
  for (int64_t i = 0; i < count; i += size) {
    decode_block<kE5M2, kAdd>(codes + i, *parameters, count - i < size ? count - i : size, out + i);
    ++parameters;
  }
}

// [e4m3, e5m2]
constexpr BlockKernels kKernels[2] = {{encode<false>, decode<false, false>, decode<false, true>},
                                      {encode<true>, decode<true, false>, decode<true, true>}};
