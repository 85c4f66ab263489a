// The kernels of sign for one instruction set: see cpu/for_each_instruction_set.h. Plain loops,
// which compilers vectorise.
#include "ops/codecs/block_codec_kernels.inl"

template <bool kLowered>
inline float sum_of_magnitudes(const float* __restrict p, int64_t n) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += magnitude_of<kLowered>(p[i + lane]);
    }
  }
  for (int64_t lane = 0; i + lane < n; ++lane) {
    lanes[lane] += magnitude_of<kLowered>(p[i + lane]);
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

inline void pack(const float* __restrict p, int64_t n, uint8_t* __restrict codes) {
  const int64_t width = (n + 7) / 8;
  for (int64_t c = 0; c < width; ++c) {
    codes[c] = 0;
  }
  for (int64_t b = 0; b < 8; ++b) {
    const int64_t first = b * width;
    const int64_t count = first >= n ? 0 : (n - first < width ? n - first : width);
    for (int64_t c = 0; c < count; ++c) {
      codes[c] = static_cast<uint8_t>(codes[c] | (bits_of(p[first + c]) >> 31 << b));
    }
  }
}

template <bool kAdd>
inline void unpack(const uint8_t* __restrict codes, float magnitude, int64_t n,
                   float* __restrict out) {
  const int64_t width = (n + 7) / 8;
  const uint32_t bits = bits_of(magnitude);
  for (int64_t b = 0; b < 8; ++b) {
    const int64_t first = b * width;
    const int64_t count = first >= n ? 0 : (n - first < width ? n - first : width);
    for (int64_t c = 0; c < count; ++c) {
      const uint32_t negative = (static_cast<uint32_t>(codes[c]) >> b) & 1u;
      const float value = float_of(bits ^ (negative << 31));
      out[first + c] = kAdd ? out[first + c] + value : value;
    }
  }
}

inline void encode_block(const float* values, int64_t n, const Encoding& encoding, float* error,
                         uint8_t* codes, float* parameters) {
  alignas(64) float buffer[kMaxBlockSize];
  const float* const p = compensated(values, n, encoding.scale, error, buffer);
  float sum = sum_of_magnitudes<false>(p, n);
  const bool is_lowered = bits_of(sum) >= kInfinity;
  if (is_lowered) {
    sum = sum_of_magnitudes<true>(p, n);
  }
  if (bits_of(sum) >= kInfinity) {
    parameters[0] = float_of(kNaN);
    __builtin_memset(codes, 0, (n + 7) / 8);
    return;  // the error stays as it was
  }
  const float magnitude = mean_magnitude(sum, static_cast<float>(n), is_lowered);
  parameters[0] = magnitude;
  pack(p, n, codes);
  if (error != nullptr) {
    const uint32_t bits = bits_of(magnitude);
    for (int64_t i = 0; i < n; ++i) {
      error[i] = p[i] - float_of(bits ^ (bits_of(p[i]) & ~kAbsolute));
    }
  }
}

void encode(const float* values, int64_t count, int64_t size, const Encoding& encoding, int64_t,
            float* error, uint8_t* codes, float* parameters) {
  for (int64_t i = 0; i < count; i += size) {
    const int64_t n = count - i < size ? count - i : size;
    encode_block(values + i, n, encoding, error == nullptr ? nullptr : error + i, codes,
                 parameters);
    codes += size / 8;
    ++parameters;
  }
}

template <bool kAdd>
void decode(const uint8_t* codes, const float* parameters, int64_t count, int64_t size,
            float* out) {
  for (int64_t i = 0; i < count; i += size) {
    unpack<kAdd>(codes, *parameters, count - i < size ? count - i : size, out + i);
    codes += size / 8;
    ++parameters;
  }
}

constexpr BlockKernels kKernels{encode, decode<false>, decode<true>};
