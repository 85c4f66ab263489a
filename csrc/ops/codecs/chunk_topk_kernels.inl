// The kernels of chunk_topk for one instruction set: see cpu/for_each_instruction_set.h. Loops over
// a chunk are plain, so that compilers vectorise them.
#include "ops/codecs/block_codec_kernels.inl"

// error = value * scale + error, in place.
inline void compensate(const float* __restrict values, int64_t n, float scale,
                       float* __restrict error) {
  for (int64_t i = 0; i < n; ++i) {
    error[i] = values[i] * scale + error[i];
  }
}

// The number of ranks that are at least `least`.
inline int32_t count_from(const int32_t* __restrict ranks, int64_t n, int32_t least) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    count += ranks[i] >= least ? 1 : 0;
  }
  return count;
}

// The largest rank that at least `wanted` of the ranks reach; the result may be up to `tolerance`
// less. low, high: bounds of that rank; at least `wanted` ranks must reach `low`.
inline int32_t find_least(const int32_t* ranks, int64_t n, int32_t wanted, int32_t low,
                          int32_t high, int32_t tolerance) {
  while (high - low > tolerance) {
    const int32_t middle = low + (high - low + 1) / 2;
    const int32_t count = count_from(ranks, n, middle);
    if (count == wanted) {
      return middle;
    }
    if (count > wanted) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Writes the largest rank of each group, and returns the largest of all. A group consists of every
// `groups`-th value.
inline int32_t largest_of_groups(const float* __restrict p, int64_t n, int64_t groups,
                                 int32_t* __restrict largest) {
  for (int64_t g = 0; g < groups; ++g) {
    largest[g] = rank_of(p[g]);
  }
  for (int64_t first = groups; first < n; first += groups) {
    const int64_t count = n - first < groups ? n - first : groups;
    for (int64_t g = 0; g < count; ++g) {
      const int32_t rank = rank_of(p[first + g]);
      largest[g] = rank > largest[g] ? rank : largest[g];
    }
  }
  int32_t most = 0;
  for (int64_t g = 0; g < groups; ++g) {
    most = largest[g] > most ? largest[g] : most;
  }
  return most;
}

// Candidates have ascending places. The arrays have room for one more vector.
struct Candidates {
  alignas(64) int32_t ranks[kLargestChunk + 16];
  alignas(64) int32_t places[kLargestChunk + 16];
  int32_t count;
};

// Collects the values of rank `least` or more. next: the values to prefetch.
inline void collect(const float* __restrict p, int64_t n, int32_t least, const float* next,
                    Candidates& found) {
  int32_t count = 0;
#if COMMHOOK_VECTOR_BYTES == 64
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i most = _mm512_set1_epi32(static_cast<int32_t>(kInfinity) + 1);
  for (int64_t i = 0; i < n; i += 16) {
    __builtin_prefetch(next + i);
    const auto used = static_cast<__mmask16>(n - i < 16 ? (1u << (n - i)) - 1u : 0xffffu);
    const __m512i bits = _mm512_maskz_loadu_epi32(used, p + i);
    const __m512i ranks = _mm512_min_epi32(
        _mm512_and_epi32(bits, _mm512_set1_epi32(static_cast<int32_t>(kAbsolute))), most);
    const auto reach = _mm512_mask_cmpge_epi32_mask(used, ranks, _mm512_set1_epi32(least));
    const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(i)));
    _mm512_storeu_si512(found.ranks + count, _mm512_maskz_compress_epi32(reach, ranks));
    _mm512_storeu_si512(found.places + count, _mm512_maskz_compress_epi32(reach, places));
    count += __builtin_popcount(reach);
  }
#else
  alignas(64) uint8_t flags[kLargestChunk + 8];
  for (int64_t i = 0; i < n; ++i) {
    flags[i] = rank_of(p[i]) >= least ? 1 : 0;
  }
  __builtin_memset(flags + n, 0, 8);
  for (int64_t i = 0; i < n; i += 8) {
    if (i % 16 == 0) {
      __builtin_prefetch(next + i);
    }
    uint64_t eight;  // a byte for each of eight values, the first in the lowest byte; mostly 0
    __builtin_memcpy(&eight, flags + i, sizeof(eight));
    for (; eight != 0; eight &= eight - 1) {
      const int64_t place = i + __builtin_ctzll(eight) / 8;
      found.places[count] = static_cast<int32_t>(place);
      found.ranks[count] = rank_of(p[place]);
      ++count;
    }
  }
#endif
  found.count = count;
}

// Keeps the `wanted` largest candidates. Of those with the least rank, keeps the lowest places.
inline void keep_largest(int32_t wanted, int32_t least, int32_t largest, Candidates& found) {
  if (found.count <= wanted) {
    return;
  }
  const int32_t rank = find_least(found.ranks, found.count, wanted, least, largest, 0);
  int32_t ties = wanted - count_from(found.ranks, found.count, rank + 1);
  int32_t count = 0;
  for (int32_t i = 0; i < found.count; ++i) {
    const int32_t own = found.ranks[i];
    if (own < rank || (own == rank && ties-- <= 0)) {
      continue;
    }
    found.ranks[count] = own;
    found.places[count] = found.places[i];
    ++count;
  }
  found.count = count;
}

template <int kBits>
inline uint32_t levels_of(const Candidates& kept) {
  if (kept.count == 0) {
    return 0;
  }
  int32_t least = kept.ranks[0];
  int32_t largest = kept.ranks[0];
  for (int32_t i = 1; i < kept.count; ++i) {
    least = kept.ranks[i] < least ? kept.ranks[i] : least;
    largest = kept.ranks[i] > largest ? kept.ranks[i] : largest;
  }
  if (largest >= static_cast<int32_t>(kInfinity)) {
    return kNoLevels;
  }
  if constexpr (kBits > 2) {
    return outer_levels(least, largest);
  }
  alignas(64) int64_t fixed[kLargestChunk];
  const int32_t exponent = exponent_of(largest);
  Sums sums{0, 0, kept.count, 0};
  for (int32_t i = 0; i < kept.count; ++i) {
    fixed[i] = fixed_of(kept.ranks[i], exponent);
    sums.all += fixed[i];
  }
  int64_t split = first_split(fixed_of(least, exponent), fixed_of(largest, exponent));
  Means means{0.0f, 0.0f};
  for (int round = 0; round < kRounds; ++round) {
    int64_t large = 0;
    int64_t count = 0;
    for (int32_t i = 0; i < kept.count; ++i) {
      large += fixed[i] > split ? fixed[i] : 0;
      count += fixed[i] > split ? 1 : 0;
    }
    sums.large = large;
    sums.large_count = static_cast<int32_t>(count);
    means = means_of(sums);
    split = next_split(means);
  }
  return mean_levels(means, exponent);
}

// Packs fields into words, from the lowest bit on.
class Packer {
 public:
  explicit Packer(uint32_t* words) : words_(words) {}

  void put(uint32_t field, int bits) {
    pending_ |= uint64_t{field} << filled_;
    filled_ += bits;
    if (filled_ >= 32) {
      *words_++ = static_cast<uint32_t>(pending_);
      pending_ >>= 32;
      filled_ -= 32;
    }
  }

  void finish() {
    if (filled_ > 0) {
      *words_ = static_cast<uint32_t>(pending_);
    }
  }

 private:
  uint32_t* words_;
  uint64_t pending_ = 0;
  int filled_ = 0;
};

inline void drop_nonfinite(float* error, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    error[i] = (bits_of(error[i]) & kAbsolute) >= kInfinity ? 0.0f : error[i];
  }
}

// At least four groups for each value that is sent: with normal values, about a fifth more values
// than that are candidates. 0 if groups would have fewer than two values.
inline int64_t groups_of(int64_t n, int64_t entries) {
  int64_t groups = 64;
  while (groups < 4 * entries) {
    groups *= 2;
  }
  return 2 * groups <= n ? groups : 0;
}

inline void select(const float* p, int64_t n, int32_t entries, const float* next,
                   Candidates& found) {
  alignas(64) int32_t of_groups[kLargestChunk];
  constexpr int32_t kTolerance = 1 << 16;  // the search may stop at a somewhat lower rank
  const int64_t groups = groups_of(n, entries);
  int32_t least = 1;  // excludes zeros
  int32_t largest = static_cast<int32_t>(kInfinity) + 1;
  if (groups > 0) {
    // A rank that the maxima of so many groups reach is reached by at least as many values.
    largest = largest_of_groups(p, n, groups, of_groups);
    const int32_t found_rank = find_least(of_groups, groups, entries, 0, largest, kTolerance);
    least = found_rank > 1 ? found_rank : 1;
  }
  collect(p, n, least, next, found);
  keep_largest(entries, least, largest, found);
}

template <int kBits>
void encode(const float* values, int64_t n, const Form& form, float scale, float* error,
            uint32_t* words) {
  alignas(64) float buffer[kLargestChunk];
  Candidates kept;
  const float* p = error;
  if (error != nullptr) {
    compensate(values, n, scale, error);
  } else {
    p = compensated(values, n, scale, nullptr, buffer);
  }
  const int entries = form.entries(n);
  select(p, n, entries, values + n, kept);
  const uint32_t word = levels_of<kBits>(kept);
  *words = word;
  Packer places(words + 1);
  Packer codes(words + 1 + form.place_words(entries));
  const bool is_finite = word != kNoLevels;
  for (int32_t i = 0; i < kept.count; ++i) {
    const int32_t place = kept.places[i];
    const uint32_t code = is_finite ? code_of(p[place], word, kBits) : 0;
    places.put(static_cast<uint32_t>(place), form.place_bits);
    codes.put(code, kBits);
    if (error != nullptr && is_finite) {
      error[place] = error[place] - value_of(code, word, kBits);
    }
  }
  const int32_t last = kept.count > 0 ? kept.places[kept.count - 1] : 0;
  for (int i = kept.count; i < entries; ++i) {
    places.put(static_cast<uint32_t>(last), form.place_bits);
    codes.put(0, kBits);
  }
  places.finish();
  codes.finish();
  if (error != nullptr && !is_finite) {
    drop_nonfinite(error, n);
  }
}

// The field that begins at `bit`, of at most 12 bits. Another word must follow its own.
inline int32_t field_at(const uint32_t* words, int64_t bit, int bits) {
  uint32_t word;
  __builtin_memcpy(&word, reinterpret_cast<const char*>(words) + bit / 8, sizeof(word));
  return static_cast<int32_t>(word >> (bit % 8) & ((1u << bits) - 1u));
}

bool are_good(const uint32_t* words, const Form& form, int64_t n) {
  const int entries = form.entries(n);
  int32_t last = 0;
  bool is_wrong = false;
  for (int i = 0; i < entries; ++i) {
    const int32_t place = field_at(words + 1, int64_t{i} * form.place_bits, form.place_bits);
    is_wrong |= place < last;
    last = place;
  }
  return !is_wrong && last < n;
}

// The values of all codes, for few codes.
template <int kBits>
class Values {
 public:
  explicit Values(uint32_t word) : word_(word) {
    if constexpr (kBits <= 4) {
      for (uint32_t code = 0; code < 1u << kBits; ++code) {
        all_[code] = value_of(code, word, kBits);
      }
    }
  }

  float of(uint32_t code) const {
    if constexpr (kBits <= 4) {
      return all_[code];
    }
    return value_of(code, word_, kBits);
  }

 private:
  uint32_t word_;
  float all_[kBits <= 4 ? 1 << kBits : 1];
};

template <int kBits, bool kAdds>
void decode(const uint32_t* words, const Form& form, int64_t n, float* values) {
  constexpr int kEach = 32 / kBits;  // codes in a word
  const int entries = form.entries(n);
  const uint32_t* const codes = words + 1 + form.place_words(entries);
  const Values<kBits> restored(*words);
  int32_t last = -1;
  for (int i = 0; i < entries; i += kEach) {
    uint32_t word = codes[i / kEach];
    const int end = i + kEach < entries ? i + kEach : entries;
    for (int j = i; j < end; ++j, word >>= kBits) {
      const int32_t place = field_at(words + 1, int64_t{j} * form.place_bits, form.place_bits);
      if (place > last) {
        const float value = restored.of(word & ((1u << kBits) - 1u));
        values[place] = kAdds ? values[place] + value : value;
      }
      last = place;
    }
  }
}

template <int kBits>
constexpr Kernels kOfBits{encode<kBits>, are_good, decode<kBits, false>, decode<kBits, true>};

// Indexed by the logarithm of the bits.
constexpr Kernels kKernels[4] = {{}, kOfBits<2>, kOfBits<4>, kOfBits<8>};
