// Conversions of errors for one instruction set: see cpu/for_each_instruction_set.h. Plain loops,
// which compilers vectorise.

void widen(const uint16_t* __restrict from, int64_t n, float* __restrict values) {
  for (int64_t i = 0; i < n; ++i) {
    values[i] = widened(from[i]);
  }
}

void narrow(const float* __restrict values, int64_t n, uint16_t* __restrict to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = nearest(values[i]);
  }
}

void narrow_at_random(const float* __restrict values, int64_t n, uint32_t place, uint32_t key,
                      uint16_t* __restrict to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = rounded_at_random(values[i], place + static_cast<uint32_t>(i), key);
  }
}

constexpr Conversions kConversions{widen, narrow, narrow_at_random};
