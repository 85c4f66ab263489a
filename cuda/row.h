// A warp's work on one contiguous row: convert, scale, measure, check. Lanes are independent, so
// that a test can run all lanes of all warps on the host.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cfloat>
#include <cstring>
#include <type_traits>

#include "tensor_table.h"

namespace commhook::cuda {

// Values are scaled in float64 if either side is float64, else in float32.
template <typename From, typename To>
using Scaling =
    std::conditional_t<std::is_same_v<From, double> || std::is_same_v<To, double>, double, float>;

// float64 becomes a 16-bit type by way of float32, as everywhere in PyTorch.
template <typename To, typename Value>
COMMHOOK_HOST_DEVICE To round_to(Value value) {
  if constexpr (std::is_same_v<Value, double> && sizeof(To) == 2) {
    return static_cast<To>(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

COMMHOOK_HOST_DEVICE bool is_finite(double value) { return value >= -DBL_MAX && value <= DBL_MAX; }
COMMHOOK_HOST_DEVICE bool is_finite(float value) { return value >= -FLT_MAX && value <= FLT_MAX; }
COMMHOOK_HOST_DEVICE bool is_finite(c10::Half value) {
  return is_finite(static_cast<float>(value));
}
COMMHOOK_HOST_DEVICE bool is_finite(c10::BFloat16 value) {
  return is_finite(static_cast<float>(value));
}

// A lane's record of the elements that it converts: scaled, and written.
struct NoMeasure {
  template <typename Value, typename To>
  COMMHOOK_HOST_DEVICE void add(Value, To) {}
};

struct Measure {
  double sum_of_squares = 0;
  int nonfinite_count = 0;

  template <typename Value, typename To>
  COMMHOOK_HOST_DEVICE void add(Value value, To written) {
    sum_of_squares += static_cast<double>(value) * static_cast<double>(value);
    nonfinite_count += is_finite(written) ? 0 : 1;
  }
};

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T values[kWidth];
};

template <typename To, typename From, typename Meter>
COMMHOOK_HOST_DEVICE To convert(From source, Scaling<From, To> scale, Meter& meter) {
  const auto value = static_cast<Scaling<From, To>>(source) * scale;
  To written = round_to<To>(value);
  if constexpr (std::is_same_v<From, To>) {
    written = scale == 1 ? source : written;  // arithmetic would change the bits of a NaN
  }
  meter.add(value, written);
  return written;
}

// kIsSame: the dtypes are equal and the scale is 1, so the elements stay as they are. Otherwise,
// with equal dtypes, the scale is not 1.
template <bool kIsSame, typename To, typename From, int kWidth, typename Meter>
COMMHOOK_HOST_DEVICE Pack<To, kWidth> convert_pack(const Pack<From, kWidth>& source,
                                                   Scaling<From, To> scale, Meter& meter) {
  Pack<To, kWidth> written;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if constexpr (kIsSame) {
      written.values[i] = source.values[i];
      meter.add(static_cast<Scaling<From, To>>(source.values[i]), source.values[i]);
    } else {
      const auto value = static_cast<Scaling<From, To>>(source.values[i]) * scale;
      written.values[i] = round_to<To>(value);
      meter.add(value, written.values[i]);
    }
  }
  return written;
}

// Shared by the vectors of a row. The source begins `shift` bytes after an aligned address.
template <typename From, typename To>
struct RowCopy {
  const From* source;
  To* destination;
  int vectors;
  int shift;
  Scaling<From, To> scale;
};

template <bool kShifted>
constexpr int kUnroll = kShifted ? 2 : 4;  // a shifted vector takes two loads

// A step of one lane. All loads precede the first use. They are kept as words, since each 16-bit
// value would take a register. They start as zeros: a value that a branch leaves undefined stays
// alive around all loops, in separate registers for each pair of dtypes. kIsWhole: no vector of the
// step is past the row's end.
template <bool kIsWhole, bool kShifted, bool kIsSame, int kWidth, typename From, typename To,
          typename Meter>
COMMHOOK_HOST_DEVICE void copy_step(const RowCopy<From, To>& row, int first, Meter& meter) {
  constexpr int kWords = kWidth * sizeof(From) / sizeof(uint32_t);
  constexpr int kVectors = kUnroll<kShifted>;
  const auto* from = reinterpret_cast<const Granule<kWords>*>(
      reinterpret_cast<const char*>(row.source) - (kShifted ? row.shift : 0));
  auto* to = reinterpret_cast<Pack<To, kWidth>*>(row.destination);
  Granule<kWords> low[kVectors] = {};
  Granule<kWords> high[kVectors] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = first + k * kWarpSize;
    if (kIsWhole || v < row.vectors) {
      low[k] = from[v];
      if constexpr (kShifted) {
        high[k] = from[v + 1];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int v = first + k * kWarpSize;
    if (kIsWhole || v < row.vectors) {
      if constexpr (kShifted) {
        low[k] = realign<sizeof(From)>(low[k], high[k], row.shift);
      }
      Pack<From, kWidth> values;
      std::memcpy(&values, &low[k], sizeof(values));
      to[v] = convert_pack<kIsSame, To>(values, row.scale, meter);
    }
  }
}

// One lane's part of the vectors of a row. The destination is aligned for vectors. The source is
// too, or begins `shift` bytes after such an address.
template <bool kShifted, bool kIsSame, int kWidth, typename From, typename To, typename Meter>
COMMHOOK_HOST_DEVICE void copy_vectors(const RowCopy<From, To>& row, int lane, Meter& meter) {
  constexpr int kStep = kUnroll<kShifted> * kWarpSize;
  int first = 0;
#pragma unroll 1
  for (; first + kStep <= row.vectors; first += kStep) {
    copy_step<true, kShifted, kIsSame, kWidth>(row, first + lane, meter);
  }
  if (first + lane < row.vectors) {
    copy_step<false, kShifted, kIsSame, kWidth>(row, first + lane, meter);
  }
}

template <bool kIsSame, int kWidth, typename From, typename To, typename Meter>
COMMHOOK_HOST_DEVICE void copy_vectors(const RowCopy<From, To>& row, int lane, Meter& meter) {
  if (row.shift == 0) {
    copy_vectors<false, kIsSame, kWidth>(row, lane, meter);
  } else {
    copy_vectors<true, kIsSame, kWidth>(row, lane, meter);
  }
}

// One lane's part of destination[i] = source[i] * scale. Vectors have 16 bytes on the side of the
// wider dtype, and as many elements on the other side. Those of the destination are aligned. If the
// source's are not, each is assembled from two aligned ones. The first may begin before the row,
// within the aligned 16 bytes around its first element. None reaches past the row's end, where the
// memory may end.
template <typename From, typename To, typename Meter>
COMMHOOK_HOST_DEVICE void copy_row(const From* source, To* destination, int count, double scale,
                                   int lane, Meter& meter) {
  constexpr int kWidth = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  const auto factor = static_cast<Scaling<From, To>>(scale);

  const auto past = reinterpret_cast<uintptr_t>(destination) % (kWidth * sizeof(To));
  auto split = split_row<kWidth>(static_cast<int>(past / sizeof(To)), count);
  const auto shift =
      static_cast<int>(reinterpret_cast<uintptr_t>(source + split.head) % (kWidth * sizeof(From)));
  if (shift != 0) {
    split = without_overread<kWidth>(split, kWidth - shift / static_cast<int>(sizeof(From)));
  }
  const int edge = edge_element<kWidth>(split, lane);
  From at_edge{};
  if (edge >= 0) {
    at_edge = source[edge];
  }

  const RowCopy<From, To> row{source + split.head, destination + split.head, split.vectors, shift,
                              factor};
  if constexpr (std::is_same_v<From, To>) {
    if (factor == 1) {
      copy_vectors<true, kWidth>(row, lane, meter);
    } else {
      copy_vectors<false, kWidth>(row, lane, meter);
    }
  } else {
    copy_vectors<false, kWidth>(row, lane, meter);
  }
  if (edge >= 0) {
    destination[edge] = convert<To>(at_edge, factor, meter);
  }
}

// One lane's part of a run, from the table's tensors into the buffer. cursor: see for_each_piece.
template <typename To, typename Table, typename Meter>
COMMHOOK_HOST_DEVICE void flatten_run(const Table& table, To* buffer, double scale, Run run,
                                      Cursor& cursor, int lane, Meter& meter) {
  for_each_piece(table, run, cursor,
                 [&](const void* data, Dtype dtype, int64_t offset, int64_t position, int count) {
                   To* to = buffer + position;
                   switch (dtype) {
                     case Dtype::kDouble:
                       return copy_row(static_cast<const double*>(data) + offset, to, count, scale,
                                       lane, meter);
                     case Dtype::kFloat:
                       return copy_row(static_cast<const float*>(data) + offset, to, count, scale,
                                       lane, meter);
                     case Dtype::kHalf:
                       return copy_row(static_cast<const c10::Half*>(data) + offset, to, count,
                                       scale, lane, meter);
                     case Dtype::kBFloat16:
                       return copy_row(static_cast<const c10::BFloat16*>(data) + offset, to, count,
                                       scale, lane, meter);
                   }
                 });
}

template <typename To, typename Table, typename Meter>
COMMHOOK_HOST_DEVICE void flatten_run(const Table& table, To* buffer, double scale, Run run,
                                      int lane, Meter& meter) {
  if (run.begin < run.end) {
    Cursor cursor = cursor_at(table, run.begin);
    flatten_run(table, buffer, scale, run, cursor, lane, meter);
  }
}

// One lane's part of a run, from the buffer into the table's tensors.
template <typename From, typename Table>
COMMHOOK_HOST_DEVICE void unflatten_run(const Table& table, const From* buffer, double scale,
                                        Run run, int lane) {
  NoMeasure meter;
  for_each_piece(
      table, run, [&](void* data, Dtype dtype, int64_t offset, int64_t position, int count) {
        const From* from = buffer + position;
        switch (dtype) {
          case Dtype::kDouble:
            return copy_row(from, static_cast<double*>(data) + offset, count, scale, lane, meter);
          case Dtype::kFloat:
            return copy_row(from, static_cast<float*>(data) + offset, count, scale, lane, meter);
          case Dtype::kHalf:
            return copy_row(from, static_cast<c10::Half*>(data) + offset, count, scale, lane,
                            meter);
          case Dtype::kBFloat16:
            return copy_row(from, static_cast<c10::BFloat16*>(data) + offset, count, scale, lane,
                            meter);
        }
      });
}

// One lane's count of a row's elements that are not finite. Vectors have 16 bytes; all loads of a
// step precede the first use.
template <typename T>
COMMHOOK_HOST_DEVICE int count_nonfinite_of_row(const T* source, int count, int lane) {
  constexpr int kWidth = 16 / sizeof(T);
  constexpr int kUnroll = 4;
  const auto past = reinterpret_cast<uintptr_t>(source) % 16;
  const auto split = split_row<kWidth>(static_cast<int>(past / sizeof(T)), count);
  const int edge = edge_element<kWidth>(split, lane);
  int nonfinite = edge >= 0 && !is_finite(source[edge]) ? 1 : 0;
  const auto* vectors = reinterpret_cast<const Granule<4>*>(source + split.head);
#pragma unroll 1
  for (int first = lane; first < split.vectors; first += kUnroll * kWarpSize) {
    Granule<4> loaded[kUnroll] = {};  // zeros count as finite
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int v = first + k * kWarpSize;
      if (v < split.vectors) {
        loaded[k] = vectors[v];
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      Pack<T, kWidth> values;
      std::memcpy(&values, &loaded[k], sizeof(values));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        nonfinite += is_finite(values.values[i]) ? 0 : 1;
      }
    }
  }
  return nonfinite;
}

// The same for a run of the table's tensors.
template <typename Table>
COMMHOOK_HOST_DEVICE int count_nonfinite_of_run(const Table& table, Run run, int lane) {
  int nonfinite = 0;
  for_each_piece(
      table, run, [&](const void* data, Dtype dtype, int64_t offset, int64_t, int count) {
        switch (dtype) {
          case Dtype::kDouble:
            nonfinite +=
                count_nonfinite_of_row(static_cast<const double*>(data) + offset, count, lane);
            return;
          case Dtype::kFloat:
            nonfinite +=
                count_nonfinite_of_row(static_cast<const float*>(data) + offset, count, lane);
            return;
          case Dtype::kHalf:
            nonfinite +=
                count_nonfinite_of_row(static_cast<const c10::Half*>(data) + offset, count, lane);
            return;
          case Dtype::kBFloat16:
            nonfinite += count_nonfinite_of_row(static_cast<const c10::BFloat16*>(data) + offset,
                                                count, lane);
            return;
        }
      });
  return nonfinite;
}

}  // namespace commhook::cuda
