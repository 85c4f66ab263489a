// What the kernels of block codecs begin with, for one instruction set: included by each of them.
// Always inlined, so that a number of values that is known when they are compiled is known here.

// p = value * scale + error for the values of a block: in `buffer`, or where they lie if there is
// nothing to do.
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

// Asks for n values that come up. They need not exist.
inline __attribute__((always_inline)) void prefetch(const float* values, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(float);
  for (int64_t i = 0; i < n; i += kLine) {
    __builtin_prefetch(values + i);
  }
}

// How far ahead of what it measures a run of blocks asks for values: 8 KiB, a quarter of a small
// first-level cache. Processors by themselves look ahead only within a page.
constexpr int64_t kAheadOfRuns = 2048;

// The bits of the largest magnitude: those of an infinity or more, if one is infinite or NaN.
inline __attribute__((always_inline)) uint32_t largest_magnitude(const float* p, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(p[i]) & kAbsolute;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
