// The kernels of fp8 for one instruction set: see cpu/for_each_instruction_set.h. Plain loops,
// which compilers vectorise, and code for AVX-512.
#include "ops/codecs/block_codec_kernels.inl"

#if COMMHOOK_VECTOR_BYTES == 64
#include "ops/codecs/fp8_avx512.inl"
#else
// This instruction set has no kernel that decodes past the caches.
template <bool kE5M2>
bool decode_past_caches(const uint8_t*, const float*, int64_t, int64_t, float*) {
  return false;
}
#endif

template <bool kE5M2, bool kError>
inline void quantize(const float* __restrict p, int64_t n, const Quantizer& quantizer,
                     float* __restrict error, uint8_t* __restrict codes) {
#if COMMHOOK_VECTOR_BYTES == 64
  if (quantizer.lift == 1.0f) {
    return quantize_lanes<kE5M2, kError>(p, n, quantizer, error, codes);
  }
#endif
  const float lift = quantizer.lift;
  const float factor = quantizer.factor;
  const float step = quantizer.step;
  for (int64_t i = 0; i < n; ++i) {
    codes[i] = round_to<kE5M2>(p[i] * lift * factor);
  }
  if constexpr (kError) {
    for (int64_t i = 0; i < n; ++i) {
      error[i] = p[i] - value_of<kE5M2>(codes[i]) * step;
    }
  }
}

// Blocks are encoded in groups, step by step, so that no block waits for another's division.
constexpr int64_t kGroupValues = 256;
constexpr int64_t kGroup = kGroupValues / 8;  // blocks

template <bool kE5M2>
inline void encode_group(const float* values, int64_t n, int64_t size, const Encoding& encoding,
                         float* error, uint8_t* codes, float* parameters) {
  alignas(64) float buffer[kMaxBlockSize];
  uint32_t largest[kGroup] = {};
  Quantizer quantizers[kGroup];
  const int64_t blocks = (n + size - 1) / size;
  const auto size_of = [&](int64_t block) { return block < blocks - 1 ? size : n - block * size; };
#if COMMHOOK_VECTOR_BYTES == 64
  const float* p = values;
  for (int64_t b = 0; b < blocks; ++b) {
    const float* const own_error = error == nullptr ? nullptr : error + b * size;
    if (compensated_lanes(values + b * size, size_of(b), encoding.scale, own_error,
                          buffer + b * size, largest[b])) {
      p = buffer;
    }
  }
#else
  const float* const p = compensated(values, n, encoding.scale, error, buffer);
  for (int64_t b = 0; b < blocks; ++b) {
    largest[b] = largest_magnitude(p + b * size, size_of(b));
  }
#endif
  for (int64_t b = 0; b < blocks; ++b) {
    quantizers[b] =
        commhook::blockwise::quantizer(float_of(largest[b]), 0.0f, Traits<kE5M2>::kLargest);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = b * size;
    if (largest[b] >= kInfinity) {
      parameters[b] = float_of(kNaN);
      __builtin_memset(codes + first, 0, size_of(b));
      continue;  // the error stays as it was
    }
    parameters[b] = quantizers[b].step;
    if (error != nullptr) {
      quantize<kE5M2, true>(p + first, size_of(b), quantizers[b], error + first, codes + first);
    } else {
      quantize<kE5M2, false>(p + first, size_of(b), quantizers[b], nullptr, codes + first);
    }
  }
}

template <bool kE5M2>
inline void encode_groups(const float* values, int64_t count, int64_t size,
                          const Encoding& encoding, float* error, uint8_t* codes,
                          float* parameters) {
  const int64_t group = size < kGroupValues ? kGroupValues / size : 1;
  for (int64_t i = 0; i < count; i += group * size) {
    const int64_t n = count - i < group * size ? count - i : group * size;
    encode_group<kE5M2>(values + i, n, size, encoding, error == nullptr ? nullptr : error + i,
                        codes + i, parameters);
    parameters += group;
  }
}

// Whether blocks without errors are encoded in runs.
bool streams(int64_t size, const Encoding&) {
#if COMMHOOK_VECTOR_BYTES == 64
  return fits_runs(size);
#else
  return false;
#endif
}

template <bool kE5M2>
void encode(const float* values, int64_t count, int64_t size, const Encoding& encoding, int64_t,
            float* error, uint8_t* codes, float* parameters) {
#if COMMHOOK_VECTOR_BYTES == 64
  // Short runs, such as those of converted tensors, do not repay the start.
  if (error == nullptr && fits_runs(size) && count >= 4 * kRun) {
    const auto pick = [&](auto run64, auto run128, auto run256) {
      return size == 64 ? run64 : size == 128 ? run128 : run256;
    };
    const auto encode_plain =
        encoding.scale == 1.0f ? pick(encode_runs<kE5M2, false, 64>, encode_runs<kE5M2, false, 128>,
                                      encode_runs<kE5M2, false, 256>)
                               : pick(encode_runs<kE5M2, true, 64>, encode_runs<kE5M2, true, 128>,
                                      encode_runs<kE5M2, true, 256>);
    while (count > 0) {
      const int64_t runs = count / kRun;
      const auto advance = [&](int64_t n) {
        values += n;
        codes += n;
        parameters += n / size;
        count -= n;
      };
      if (runs > 0) {
        advance(kRun * encode_plain(values, runs, encoding.scale, encoding.is_streamed, codes,
                                    parameters));
      }
      if (count > 0) {  // a run with a block that needs more care, or an incomplete run
        const int64_t n = count < kRun ? count : kRun;
        encode_groups<kE5M2>(values, n, size, encoding, nullptr, codes, parameters);
        advance(n);
      }
    }
    return;
  }
#endif
  encode_groups<kE5M2>(values, count, size, encoding, error, codes, parameters);
}

template <bool kE5M2, bool kAdd>
inline void decode_block(const uint8_t* __restrict codes, float step, int64_t n,
                         float* __restrict out) {
#if COMMHOOK_VECTOR_BYTES == 64
  decode_lanes<kE5M2, kAdd>(codes, step, n, out);
#else
  for (int64_t i = 0; i < n; ++i) {
    const float value = value_of<kE5M2>(codes[i]) * step;
    out[i] = kAdd ? out[i] + value : value;
  }
#endif
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
constexpr BlockKernels kKernels[2] = {
    {encode<false>, decode<false, false>, decode<false, true>, streams, decode_past_caches<false>},
    {encode<true>, decode<true, false>, decode<true, true>, streams, decode_past_caches<true>}};
