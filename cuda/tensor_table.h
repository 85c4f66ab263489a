// The tensors of one launch, in the kernel's arguments by value. This needs no copy to the device,
// no pinned memory and no synchronisation, and a CUDA graph keeps its own copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "partition.h"

namespace commhook::cuda {

enum class Dtype : uint8_t { kDouble, kFloat, kHalf, kBFloat16 };

// One contiguous tensor. Data is `const void` for tensors that are read, `void` for those written.
template <typename Data>
struct Segment {
  Data* data;
  int64_t numel;
  Dtype dtype;
};

template <typename DataType, int kTensors>
struct TensorTable {
  using Data = DataType;
  static constexpr int kCapacity = kTensors;
  static constexpr int kSlices = kTensors / 8;
  static_assert(kSlices >= 1 && kTensors <= UINT16_MAX);

  struct Entry {
    Data* data;
    int64_t
        end;  // position after the tensor's last element; positions count from the table's first
  };
  Entry entries[kTensors];
  int64_t total;  // elements
  int count;      // tensors
  // Divides positions into slices of 2^slice_shift. A search begins between the tensors at the
  // first positions of a slice and of the next one. A binary search over the whole table would be a
  // chain of as many misses in the constant cache.
  int slice_shift;
  uint16_t slice_first[kSlices + 1];
  Dtype dtypes[kTensors];
};

// Fills the table with as many segments as fit, and returns their number. No segment may be empty.
template <typename Table>
int fill_table(Table& table, const Segment<typename Table::Data>* segments, size_t count) {
  const auto size = static_cast<int>(count < Table::kCapacity ? count : size_t{Table::kCapacity});
  table.total = 0;
  table.count = size;
  for (int i = 0; i < size; ++i) {
    table.total += segments[i].numel;
    table.entries[i] = {segments[i].data, table.total};
    table.dtypes[i] = segments[i].dtype;
  }
  table.slice_shift = 0;
  while ((table.total - 1) >> table.slice_shift >= Table::kSlices) {
    ++table.slice_shift;
  }
  const auto slices = static_cast<int>((table.total - 1) >> table.slice_shift) + 1;
  int tensor = 0;
  for (int slice = 0; slice < slices; ++slice) {
    while (table.entries[tensor].end <= int64_t{slice} << table.slice_shift) {
      ++tensor;
    }
    table.slice_first[slice] = static_cast<uint16_t>(tensor);
  }
  table.slice_first[slices] = static_cast<uint16_t>(size - 1);
  return size;
}

inline int64_t bytes_of(Dtype dtype) {
  return dtype == Dtype::kDouble ? 8 : dtype == Dtype::kFloat ? 4 : 2;
}

// Segments for one table, with the elements from `first` on.
template <typename Data>
struct Window {
  int64_t first;
  std::vector<Segment<Data>> segments;
};

// Splits all segments, none of them empty, into windows of at most `capacity` segments. The
// elements of each window but the last are a multiple of `multiple`, so the segment at its end is
// cut. Returns none if `capacity` segments have fewer than `multiple` elements.
template <typename Data>
std::vector<Window<Data>> windows_of(const Segment<Data>* segments, size_t count, size_t capacity,
                                     int64_t multiple) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  std::vector<Window<Data>> windows;
  int64_t first = 0;
  int64_t start = 0;  // position of the segment i
  for (size_t i = 0; i < count;) {
    int64_t end = start;
    size_t next = i;
    while (next < count && next - i < capacity) {
      end += segments[next++].numel;
    }
    const int64_t stop = next == count ? end : end - end % multiple;
    if (stop <= first) {
      return {};
    }
    Window<Data> window{first, {}};
    while (start < stop) {
      const auto& whole = segments[i];
      const int64_t from = std::max(first, start);
      const int64_t to = std::min(stop, start + whole.numel);
      auto* const data = static_cast<Byte*>(whole.data) + (from - start) * bytes_of(whole.dtype);
      window.segments.push_back({data, to - from, whole.dtype});
      if (to < start + whole.numel) {
        break;  // the next window takes the rest
      }
      start += whole.numel;
      ++i;
    }
    windows.push_back(std::move(window));
    first = stop;
  }
  return windows;
}

// The tensor that holds a position below the table's total.
template <typename Table>
COMMHOOK_HOST_DEVICE int find_tensor(const Table& table, int64_t position) {
  const auto slice = static_cast<int>(position >> table.slice_shift);
  int low = table.slice_first[slice];
  int high = table.slice_first[slice + 1];
  while (low < high) {
    const int middle = (low + high) / 2;
    if (table.entries[middle].end <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// A tensor of the table, and the position of its first element.
struct Cursor {
  int tensor;
  int64_t start;
};

// The tensor that holds a position below the table's total.
template <typename Table>
COMMHOOK_HOST_DEVICE Cursor cursor_at(const Table& table, int64_t position) {
  const int tensor = find_tensor(table, position);
  return {tensor, tensor == 0 ? 0 : table.entries[tensor - 1].end};
}

// Calls visit(data, dtype, offset, position, count) for each tensor's part of the run, in order:
// `count` elements from `offset` in the tensor and `position` in the table on. The run begins at
// the cursor's tensor; the cursor moves to the next run's.
template <typename Table, typename Visit>
COMMHOOK_HOST_DEVICE void for_each_piece(const Table& table, Run run, Cursor& cursor,
                                         const Visit& visit) {
  int64_t position = run.begin;
  while (position < run.end) {
    const int64_t end = table.entries[cursor.tensor].end;
    const int64_t stop = run.end < end ? run.end : end;
    visit(table.entries[cursor.tensor].data, table.dtypes[cursor.tensor], position - cursor.start,
          position, static_cast<int>(stop - position));
    position = stop;
    if (stop == end) {
      cursor = {cursor.tensor + 1, end};
    }
  }
}

template <typename Table, typename Visit>
COMMHOOK_HOST_DEVICE void for_each_piece(const Table& table, Run run, const Visit& visit) {
  if (run.begin < run.end) {
    Cursor cursor = cursor_at(table, run.begin);
    for_each_piece(table, run, cursor, visit);
  }
}

}  // namespace commhook::cuda
