// Shared by the kernels of block codecs; each includes this file for one instruction set. Always
// inlined, so that a caller's constant number of values is constant here.

// Computes p = value * scale + error for a block. Returns `buffer`, or `values` if p equals them.
inline __attribute__((always_inline)) const float* compensated(const float* values, int64_t n,
                                                               float scale, const float* error,
                                                               float* buffer) {
  if (error != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      buffer[i] = values[i] * scale + error[i];
    }
    return buffer;
  }
  if (scale != 1.0f) {
    for (int64_t i = 0; i < n; ++i) {
      buffer[i] = values[i] * scale;
    }
    return buffer;
  }
  return values;
}

// Prefetches n values. The addresses need not be valid.
inline __attribute__((always_inline)) void prefetch(const float* values, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(float);
  for (int64_t i = 0; i < n; i += kLine) {
    __builtin_prefetch(values + i);
  }
}

// A run of blocks prefetches this far ahead of the values that it measures: 8 KiB, a quarter of a
// small first-level cache. The processor itself prefetches only within a page.
constexpr int64_t kAheadOfRuns = 2048;

// The bits of the largest magnitude; at least an infinity's if a value is infinite or NaN.
inline __attribute__((always_inline)) uint32_t largest_magnitude(const float* p, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(p[i]) & kAbsolute;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
