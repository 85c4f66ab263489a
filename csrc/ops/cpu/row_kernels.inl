// The body of the row kernels, included once for each instruction set in a separate namespace. The
// including file defines there:
//   Vec                               a vector of kWidth floats, with
//   load(p, n), store<kStream>(p, v, n)   for float, c10::Half, c10::BFloat16; n <= kWidth elements
//   multiply(v, s)                        by a scalar
//   Measure<To>                           add(v, n), finish(stats)
//   fence()                               orders streamed stores
// Nothing here may use a template of the standard library: it would be compiled for this
// instruction set and could be linked into code that runs on other processors.

template <typename T>
constexpr bool is_double = false;
template <>
constexpr bool is_double<double> = true;
template <typename T>
constexpr bool is_half = false;
template <>
constexpr bool is_half<c10::Half> = true;

// Converts rows that are scaled in float32.
template <typename From, typename To, bool kStream, bool kMeasure>
void convert_float(const From* source, To* destination, int64_t count, float scale,
                   RowStats* stats) {
  Measure<To> measure;
  int64_t i = 0;
  const auto step = [&](int64_t n, bool streamed) {
    const Vec v = multiply(load(source + i, n), scale);
    if constexpr (kMeasure) {
      measure.add(v, n);
    }
    if (streamed) {
      store<true>(destination + i, v, n);
    } else {
      store<false>(destination + i, v, n);
    }
    i += n;
  };
  if constexpr (kStream && kWidth > 1) {
    // Streamed stores must be aligned, and they pay only for whole cache lines. Foreign memory
    // (torch.frombuffer) may start inside an element, so that no element is aligned.
    if (reinterpret_cast<uintptr_t>(destination) % sizeof(To) != 0) {
      return convert_float<From, To, false, kMeasure>(source, destination, count, scale, stats);
    }
    const auto misaligned = reinterpret_cast<uintptr_t>(destination) % 64 / sizeof(To);
    int64_t head = misaligned == 0 ? 0 : static_cast<int64_t>(64 / sizeof(To) - misaligned);
    head = head < count ? head : count;
    while (i < head) {
      step(head - i < kWidth ? head - i : kWidth, false);
    }
  }
  // A constant n lets the compiler drop the masks.
  for (; i + 4 * kWidth <= count;) {
    step(kWidth, kStream);
    step(kWidth, kStream);
    step(kWidth, kStream);
    step(kWidth, kStream);
  }
  for (; i + kWidth <= count;) {
    step(kWidth, kStream);
  }
  if (i < count) {
    step(count - i, false);
  }
  if constexpr (kMeasure) {
    measure.finish(stats);
  }
  if constexpr (kStream) {
    fence();
  }
}

constexpr int64_t kPiece = 512;

// Converts rows with float64 on either side, scaled in float64. float16 and bfloat16 pass through
// float32 in pieces that stay in the first-level cache.
template <typename From, typename To, bool kMeasure>
void convert_double(const From* source, To* destination, int64_t count, double scale,
                    RowStats* stats) {
  double sum_of_squares = 0;
  int64_t nonfinite = 0;
  for (int64_t begin = 0; begin < count; begin += kPiece) {
    const int64_t n = count - begin < kPiece ? count - begin : kPiece;
    double values[kPiece];
    if constexpr (is_double<From> || sizeof(From) == sizeof(float)) {
      for (int64_t i = 0; i < n; ++i) {
        values[i] = static_cast<double>(source[begin + i]) * scale;
      }
    } else {
      float wide[kPiece];
      convert_float<From, float, false, false>(source + begin, wide, n, 1.0f, nullptr);
      for (int64_t i = 0; i < n; ++i) {
        values[i] = static_cast<double>(wide[i]) * scale;
      }
    }
    if constexpr (kMeasure) {
      for (int64_t i = 0; i < n; ++i) {
        sum_of_squares += values[i] * values[i];
      }
    }
    if constexpr (is_double<To>) {
      for (int64_t i = 0; i < n; ++i) {
        destination[begin + i] = values[i];
        if constexpr (kMeasure) {
          nonfinite += !(__builtin_fabs(values[i]) <= __DBL_MAX__);
        }
      }
#ifdef __aarch64__
    } else if constexpr (is_half<To>) {
      // Here a c10::Half is constructed from a float16_t, so a float64 is rounded once, as in ATen.
      for (int64_t i = 0; i < n; ++i) {
        destination[begin + i] = static_cast<To>(values[i]);
        if constexpr (kMeasure) {
          nonfinite +=
              !(__builtin_fabsf(static_cast<float>(destination[begin + i])) <= __FLT_MAX__);
        }
      }
#endif
    } else {
      float narrow[kPiece];
      for (int64_t i = 0; i < n; ++i) {
        narrow[i] = static_cast<float>(values[i]);
      }
      if constexpr (kMeasure) {
        RowStats piece;
        convert_float<float, To, false, true>(narrow, destination + begin, n, 1.0f, &piece);
        nonfinite += piece.nonfinite_count;
      } else {
        convert_float<float, To, false, false>(narrow, destination + begin, n, 1.0f, nullptr);
      }
    }
  }
  if constexpr (kMeasure) {
    stats->sum_of_squares += sum_of_squares;
    stats->nonfinite_count += nonfinite;
  }
}

// Copies bits without scaling or conversion, including signalling NaNs and payloads.
template <bool kStream>
void copy_bits(const char* source, char* destination, int64_t bytes) {
  int64_t i = 0;
  if constexpr (kWidth > 1) {
    constexpr int64_t kVec = kWidth * sizeof(float);
    const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(destination) % 64);
    const int64_t head = misaligned == 0 ? 0 : 64 - misaligned;
    if (head < bytes) {
      __builtin_memcpy(destination, source, head);
      // Loads and stores of vectors move bits: arithmetic alone would change a NaN.
      const auto step = [&] {
        store<kStream>(reinterpret_cast<float*>(destination + i),
                       load(reinterpret_cast<const float*>(source + i), kWidth), kWidth);
        i += kVec;
      };
      for (i = head; i + 4 * kVec <= bytes;) {
        step();
        step();
        step();
        step();
      }
      while (i + kVec <= bytes) {
        step();
      }
      if constexpr (kStream) {
        fence();
      }
    }
  }
  __builtin_memcpy(destination + i, source + i, bytes - i);
}

inline void stream_lines(const void* source, void* destination, int64_t bytes) {
  const auto* const from = static_cast<const float*>(source);
  auto* const to = static_cast<float*>(destination);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < count; i += kWidth) {
    store<true>(to + i, load(from + i, kWidth), kWidth);
  }
}

template <typename From, typename To>
constexpr bool is_same = false;
template <typename T>
constexpr bool is_same<T, T> = true;

template <typename From, typename To, bool kStream, bool kMeasure>
void convert(const void* source, void* destination, int64_t count, double scale, RowStats* stats) {
  const auto* from = static_cast<const From*>(source);
  auto* to = static_cast<To*>(destination);
  if constexpr (is_same<From, To> && !kMeasure) {
    if (scale == 1.0) {
      return copy_bits<kStream>(static_cast<const char*>(source), static_cast<char*>(destination),
                                count * static_cast<int64_t>(sizeof(From)));
    }
  }
  if constexpr (is_double<From> || is_double<To>) {
    convert_double<From, To, kMeasure>(from, to, count, scale, stats);
  } else {
    convert_float<From, To, kStream, kMeasure>(from, to, count, static_cast<float>(scale), stats);
  }
}

// Tests whether all bits of the exponent are set, as integers, and counts in lanes of the same
// width, so that each instruction set's widest vectors apply.
template <typename Bits, Bits kExponent>
int64_t count_nonfinite(const void* source, int64_t count) {
  constexpr int64_t kBlock = 16384;  // no lane of 16 bits overflows
  const auto* bits = static_cast<const Bits*>(source);
  int64_t total = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = count - begin < kBlock ? count : begin + kBlock;
    Bits part = 0;
    for (int64_t i = begin; i < end; ++i) {
      part = static_cast<Bits>(part + ((bits[i] & kExponent) == kExponent ? 1 : 0));
    }
    total += static_cast<int64_t>(part);
  }
  return total;
}

// clang-format off
#define COMMHOOK_ROW(From, kStream, kMeasure)                                          \
  {convert<From, double, kStream, kMeasure>, convert<From, float, kStream, kMeasure>,  \
   convert<From, c10::Half, kStream, kMeasure>, convert<From, c10::BFloat16, kStream, kMeasure>}
#define COMMHOOK_TABLE(kStream, kMeasure)                                              \
  {COMMHOOK_ROW(double, kStream, kMeasure), COMMHOOK_ROW(float, kStream, kMeasure),    \
   COMMHOOK_ROW(c10::Half, kStream, kMeasure), COMMHOOK_ROW(c10::BFloat16, kStream, kMeasure)}

constexpr RowKernels kKernels = {
    COMMHOOK_TABLE(false, false), COMMHOOK_TABLE(true, false),
    COMMHOOK_TABLE(false, true), COMMHOOK_TABLE(true, true),
    {count_nonfinite<uint64_t, 0x7ff0000000000000>, count_nonfinite<uint32_t, 0x7f800000>,
     count_nonfinite<uint16_t, 0x7c00>, count_nonfinite<uint16_t, 0x7f80>},
    stream_lines, fence};
// clang-format on
#undef COMMHOOK_ROW
#undef COMMHOOK_TABLE
