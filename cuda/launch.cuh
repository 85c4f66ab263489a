// Shared by the launchers: tables of tensors in kernel arguments, several launches if a table is
// full, and the shape of a launch.
#pragma once

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime.h>

#include <limits>

#include "bucket_launch.h"
#include "occupancy.cuh"
#include "tensor_table.h"

namespace commhook::cuda {

// Capacities of tables. Each launch copies all of a kernel's arguments, so a short list should not
// pay for a long table. More than 4 KB need CUDA 12.1, in the toolkit and in the driver.
constexpr int kShortTable = 216;
constexpr int kMediumTable = 896;
constexpr int kLongTable = 1880;
constexpr int kArgumentBytes = 4096;
constexpr int kLargeArgumentBytes = 32764;
constexpr int kOtherArgumentBytes = 192;  // more than the other arguments of any kernel

#if CUDART_VERSION >= 12010
inline bool has_large_arguments() {
  static const bool has = [] {
    int driver = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
    return driver >= 12010;
  }();
  return has;
}
#endif

// The shape of one launch over a table.
struct Grid {
  unsigned blocks;
  int run;  // elements for a warp
};

// kernel: processes `total` elements in runs, with blocks of kThreads.
template <typename... Arguments>
Grid grid_of(void (*kernel)(Arguments...), int64_t total) {
  const int run = run_length(total, warps_of_a_wave(kernel, kThreads));
  const int64_t blocks = block_count(total, run);
  TORCH_CHECK(blocks <= std::numeric_limits<int>::max(), "bucket: tensors must hold at most ",
              int64_t{std::numeric_limits<int>::max()} * kWarpsPerBlock * run,
              " elements in total, got ", total);
  return {static_cast<unsigned>(blocks), run};
}

// The number of blocks for `count` pieces of work; each block takes `each`.
inline unsigned blocks_for(int64_t count, int64_t each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

template <int kCapacity, typename Data, typename Launch>
void for_each_table_of(c10::ArrayRef<Segment<Data>> segments, const Launch& launch) {
  TensorTable<Data, kCapacity> table;
  static_assert(sizeof(table) + kOtherArgumentBytes <=
                (kCapacity <= kShortTable ? kArgumentBytes : kLargeArgumentBytes));
  int64_t offset = 0;
  while (!segments.empty()) {
    segments = segments.slice(fill_table(table, segments.data(), segments.size()));
    launch(table, offset);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    offset += table.total;
  }
}

// Calls launch(table, offset) for as few tables as possible. offset: the position of the table's
// first element in the bucket.
template <typename Data, typename Launch>
void for_each_table(c10::ArrayRef<Segment<Data>> segments, const Launch& launch) {
#if CUDART_VERSION >= 12010
  if (segments.size() > kMediumTable && has_large_arguments()) {
    return for_each_table_of<kLongTable>(segments, launch);
  }
  if (segments.size() > kShortTable && has_large_arguments()) {
    return for_each_table_of<kMediumTable>(segments, launch);
  }
#endif
  for_each_table_of<kShortTable>(segments, launch);
}

// Calls launch(table, first tile) for tables of whole tiles, of `values` each, that together hold
// all segments. If a tile has more tensors than a table, launches nothing and returns false.
template <int kCapacity, typename Data, typename Launch>
bool with_tables_of(c10::ArrayRef<Segment<Data>> segments, int64_t values, const Launch& launch) {
  TensorTable<Data, kCapacity> table;
  if (segments.size() <= kCapacity) {
    fill_table(table, segments.data(), segments.size());
    launch(table, 0);
    return true;
  }
  const auto windows = windows_of(segments.data(), segments.size(), kCapacity, values);
  for (const auto& window : windows) {
    fill_table(table, window.segments.data(), window.segments.size());
    launch(table, window.first / values);
  }
  return !windows.empty();
}

// The same, with tables as small as possible. If no table fits, moves the elements through a flat
// tensor, with `options`.
template <typename Data, typename Launch>
void with_tables(c10::ArrayRef<Segment<Data>> segments, int64_t values,
                 const at::TensorOptions& options, const Launch& launch) {
  bool is_done = false;
#if CUDART_VERSION >= 12010
  if (segments.size() > kShortTable && has_large_arguments()) {
    is_done = with_tables_of<kLongTable>(segments, values, launch);
  }
#endif
  if (is_done || with_tables_of<kShortTable>(segments, values, launch)) {
    return;
  }
  int64_t total = 0;
  for (const auto& segment : segments) {
    total += segment.numel;
  }
  const auto flat = at::empty({total}, options.dtype(at::kFloat));
  const Segment<Data> whole{flat.mutable_data_ptr(), total, Dtype::kFloat};
  if constexpr (std::is_const_v<Data>) {
    launch_flatten(segments, 1.0, flat);
    with_tables_of<kShortTable>(c10::ArrayRef<Segment<Data>>(whole), values, launch);
  } else {
    with_tables_of<kShortTable>(c10::ArrayRef<Segment<Data>>(whole), values, launch);
    launch_unflatten_into(flat, segments, 1.0);
  }
}

}  // namespace commhook::cuda
