// Matrices and thin factors on the CPU. Each step goes through memory once, where separate products
// and additions would do so several times. The order of sums depends neither on the number of
// threads nor on the instruction set.
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "ops/cpu/capability.h"
#include "ops/cpu/row_kernels.h"
#include "ops/cpu/streaming.h"
#include "ops/low_rank/low_rank.h"

namespace commhook::low_rank {
namespace {

// The number of partial sums of one row.
template <typename T>
constexpr int kLanes = 64 / sizeof(T);
constexpr int kAtOnce = 4;  // directions at once
constexpr int kRows = 8;    // rows that are added at once

// With fewer elements, waking a thread costs more than it saves.
constexpr int64_t kGrainElements = 64 * 1024;
// The piece of a row that a kernel takes at once; with its factors, it stays in the first-level
// cache.
constexpr int64_t kPieceBytes = 8192;
// Columns that one thread takes at once, if there are enough for all threads. Their sums stay in
// the first-level cache. Fewer columns are slower, since each row is in a different page of memory.
constexpr int64_t kMostColumns = 1024;
constexpr int64_t kLeastColumns = 64;
// Rows that one thread takes at once, and rows in a partial sum. These do not depend on the number
// of threads.
constexpr int64_t kMostRows = 16384;
constexpr int64_t kSummedRows = 256;
static_assert(kMostRows % kSummedRows == 0);

// Kernels for a number of directions.
template <typename T>
struct Directions {
  using AddProducts = void (*)(const T* values, T* memory, const T* factor, int64_t stride,
                               int64_t n, T* sums);
  AddProducts read;
  AddProducts write;
  AddProducts add;
  using AddRows = void (*)(const T* rows, int64_t row_stride, const T* weights,
                           int64_t weight_stride, int64_t n, T* sums, int64_t sum_stride);
  AddRows add_row;
  AddRows add_rows;
  void (*subtract)(T* row, const T* weights, int64_t weight_stride, const T* factor, int64_t stride,
                   int64_t n);
  using Multiply = void (*)(T* row, const T* weights, int64_t weight_stride, const T* factor,
                            int64_t stride, int64_t n);
  Multiply multiply;
  Multiply add_product;
};

#define COMMHOOK_KERNELS "ops/low_rank/low_rank_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

// The kernels for 1 to kAtOnce directions.
template <typename T>
const Directions<T>* all_kernels() {
  return COMMHOOK_CHOOSE(kDirections<T>);
}

// Calls visit(first direction, kernels) for all directions.
template <typename T, typename Visit>
void for_directions(const Directions<T>* all, int64_t rank, const Visit& visit) {
  for (int64_t j = 0; j < rank; j += kAtOnce) {
    visit(j, all[std::min<int64_t>(kAtOnce, rank - j) - 1]);
  }
}

struct Shape {
  explicit Shape(const at::Tensor& matrices)
      : matrices(matrices.size(0)),
        rows(matrices.size(1)),
        columns(matrices.size(2)),
        distance(matrices.stride(0)) {}

  int64_t matrices;
  int64_t rows;
  int64_t columns;
  int64_t distance;
};

template <typename T>
T summed(T* lanes) {
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      lanes[i] += lanes[i + width];
    }
  }
  return lanes[0];
}

// Reads a row's values from another dtype.
struct Source {
  const char* data;
  int64_t element_size;
  cpu::RowKernel convert;  // null if no conversion is needed
};

// source_of(matrix): the source of its values. memory: the destination of the values, or null.
template <typename T, typename SourceOf>
void run_left(const Shape& shape, const SourceOf& source_of, T* memory, bool adds, const T* right,
              T* left, int64_t rank) {
  const auto* const all = all_kernels<T>();
  constexpr int64_t kPiece = kPieceBytes / sizeof(T);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, shape.columns));
  at::parallel_for(0, shape.matrices * shape.rows, grain, [&](int64_t begin, int64_t end) {
    alignas(64) T piece[kPiece];
    std::vector<T> sums(rank * kLanes<T>);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t matrix = i / shape.rows;
      const int64_t row = i % shape.rows;
      const Source source = source_of(matrix);
      const T* const factor = right + matrix * rank * shape.columns;
      std::fill(sums.begin(), sums.end(), T(0));
      for (int64_t c = 0; c < shape.columns; c += kPiece) {
        const int64_t n = std::min(kPiece, shape.columns - c);
        const char* const from = source.data + (row * shape.columns + c) * source.element_size;
        if (source.convert != nullptr) {
          source.convert(from, piece, n, 1.0, nullptr);
        }
        const T* const values =
            source.convert == nullptr ? reinterpret_cast<const T*>(from) : piece;
        T* const to = memory == nullptr
                          ? nullptr
                          : memory + matrix * shape.distance + row * shape.columns + c;
        for_directions(all, rank, [&](int64_t j, const Directions<T>& kernels) {
          const T* const some = factor + j * shape.columns + c;
          T* const added = sums.data() + j * kLanes<T>;
          if (to == nullptr) {
            kernels.read(values, nullptr, some, shape.columns, n, added);
          } else if (j > 0) {
            kernels.read(to, nullptr, some, shape.columns, n, added);
          } else {
            (adds ? kernels.add : kernels.write)(values, to, some, shape.columns, n, added);
          }
        });
      }
      for (int64_t j = 0; j < rank; ++j) {
        left[(matrix * rank + j) * shape.rows + row] = summed(sums.data() + j * kLanes<T>);
      }
    }
  });
}

// right = the product of n columns and some rows of a matrix with these rows of `left`. columns,
// left_rows: the size of the whole matrix.
template <typename T>
void right_of_part(const Directions<T>* all, const T* matrix, int64_t rows, int64_t columns,
                   int64_t n, const T* left, int64_t left_rows, T* right, int64_t rank, T* sums) {
  for (int64_t j = 0; j < rank; ++j) {
    std::fill_n(right + j * columns, n, T(0));
  }
  for (int64_t begin = 0; begin < rows; begin += kSummedRows) {
    const int64_t end = std::min(rows, begin + kSummedRows);
    std::fill_n(sums, rank * n, T(0));
    int64_t row = begin;
    for (; row + kRows <= end; row += kRows) {
      for_directions(all, rank, [&](int64_t j, const Directions<T>& kernels) {
        kernels.add_rows(matrix + row * columns, columns, left + j * left_rows + row, left_rows, n,
                         sums + j * n, n);
      });
    }
    for (; row < end; ++row) {
      for_directions(all, rank, [&](int64_t j, const Directions<T>& kernels) {
        kernels.add_row(matrix + row * columns, columns, left + j * left_rows + row, left_rows, n,
                        sums + j * n, n);
      });
    }
    for (int64_t j = 0; j < rank; ++j) {
      for (int64_t c = 0; c < n; ++c) {
        right[j * columns + c] += sums[j * n + c];
      }
    }
  }
}

// Subtracts the product for some rows and columns of a matrix, as above.
template <typename T>
void subtract_from_part(const Directions<T>* all, T* matrix, int64_t rows, int64_t columns,
                        int64_t n, const T* left, int64_t left_rows, const T* right, int64_t rank) {
  for (int64_t row = 0; row < rows; ++row) {
    for_directions(all, rank, [&](int64_t j, const Directions<T>& kernels) {
      kernels.subtract(matrix + row * columns, left + j * left_rows + row, left_rows,
                       right + j * columns, columns, n);
    });
  }
}

// Splits tall matrices by rows too, and adds the products of the parts.
template <typename T>
void run_right(const Shape& shape, T* matrices, const T* left, T* right, int64_t rank,
               bool subtracts) {
  const auto* const all = all_kernels<T>();
  const int64_t share = shape.matrices * shape.columns / at::get_num_threads() / kLeastColumns;
  const int64_t columns = std::min(std::max<int64_t>(1, shape.columns),
                                   std::clamp(share * kLeastColumns, kLeastColumns, kMostColumns));
  const int64_t across = (shape.columns + columns - 1) / columns;
  const int64_t down = std::max<int64_t>(1, (shape.rows + kMostRows - 1) / kMostRows);
  const int64_t rows = std::min(std::max<int64_t>(1, shape.rows), kMostRows);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / (rows * columns));
  const int64_t factor = rank * shape.columns;
  std::vector<T> partial(down > 1 ? shape.matrices * down * factor : 0);

  // visit(matrix, first row, rows, first column, columns, which part down)
  const auto for_parts = [&](const auto& visit) {
    at::parallel_for(0, shape.matrices * down * across, grain, [&](int64_t begin, int64_t end) {
      std::vector<T> sums(rank * columns);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % across * columns;
        const int64_t part = i / across % down;
        const int64_t row = part * kMostRows;
        visit(i / across / down, row, std::min(kMostRows, shape.rows - row), first,
              std::min(columns, shape.columns - first), part, sums.data());
      }
    });
  };
  const auto subtract = [&](int64_t matrix, int64_t row, int64_t n_rows, int64_t first, int64_t n) {
    subtract_from_part(all, matrices + matrix * shape.distance + row * shape.columns + first,
                       n_rows, shape.columns, n, left + matrix * rank * shape.rows + row,
                       shape.rows, right + matrix * factor + first, rank);
  };

  for_parts([&](int64_t matrix, int64_t row, int64_t n_rows, int64_t first, int64_t n, int64_t part,
                T* sums) {
    T* const into =
        down > 1 ? partial.data() + (matrix * down + part) * factor : right + matrix * factor;
    right_of_part(all, matrices + matrix * shape.distance + row * shape.columns + first, n_rows,
                  shape.columns, n, left + matrix * rank * shape.rows + row, shape.rows,
                  into + first, rank, sums);
    if (subtracts && down == 1) {  // while the values are in a cache
      subtract(matrix, row, n_rows, first, n);
    }
  });
  if (down == 1) {
    return;
  }
  for (int64_t matrix = 0; matrix < shape.matrices; ++matrix) {
    T* const sum = right + matrix * factor;
    for (int64_t part = 0; part < down; ++part) {
      const T* const of_part = partial.data() + (matrix * down + part) * factor;
      for (int64_t i = 0; i < factor; ++i) {
        sum[i] = part == 0 ? of_part[i] : sum[i] + of_part[i];
      }
    }
  }
  if (subtracts) {
    for_parts([&](int64_t matrix, int64_t row, int64_t n_rows, int64_t first, int64_t n, int64_t,
                  T*) { subtract(matrix, row, n_rows, first, n); });
  }
}

template <typename T>
void run_product(const Shape& shape, const T* left, const T* right, T* matrices, int64_t rank,
                 bool streamed) {
  const auto* const all = all_kernels<T>();
  constexpr int64_t kPiece = kPieceBytes / sizeof(T);
  static_assert(kPieceBytes <= cpu::Stream::kMost);
  const auto& rows = cpu::row_kernels(cpu::capability());
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, shape.columns));
  at::parallel_for(0, shape.matrices * shape.rows, grain, [&](int64_t begin, int64_t end) {
    cpu::Stream stream(rows, kPieceBytes);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t matrix = i / shape.rows;
      const int64_t row = i % shape.rows;
      for (int64_t c = 0; c < shape.columns; c += kPiece) {
        const int64_t n = std::min(kPiece, shape.columns - c);
        T* const out = matrices + matrix * shape.distance + row * shape.columns + c;
        T* const to = streamed
                          ? static_cast<T*>(stream.place(out, n * static_cast<int64_t>(sizeof(T))))
                          : out;
        for_directions(all, rank, [&](int64_t j, const Directions<T>& kernels) {
          (j == 0 ? kernels.multiply : kernels.add_product)(
              to, left + (matrix * rank + j) * shape.rows + row, shape.rows,
              right + (matrix * rank + j) * shape.columns + c, shape.columns, n);
        });
      }
    }
  });
}

// Calls run(T()) with the dtype of the matrices.
template <typename Run>
void with_dtype(const at::Tensor& matrices, const Run& run) {
  if (matrices.scalar_type() == at::kDouble) {
    run(double());
  } else {
    run(float());
  }
}

}  // namespace

void left_on_cpu(const at::Tensor& matrices, const at::Tensor& right, const at::Tensor& left) {
  with_dtype(matrices, [&](auto number) {
    using T = decltype(number);
    const Shape shape(matrices);
    const auto* const data = matrices.const_data_ptr<T>();
    run_left<T>(
        shape,
        [&](int64_t matrix) {
          return Source{reinterpret_cast<const char*>(data + matrix * shape.distance), sizeof(T),
                        nullptr};
        },
        nullptr, false, right.const_data_ptr<T>(), left.mutable_data_ptr<T>(), right.size(1));
  });
}

void gather_left_on_cpu(at::TensorList gradients, const at::Tensor& matrices,
                        const at::Tensor& right, const at::Tensor& left, bool adds) {
  const auto& rows = cpu::row_kernels(cpu::capability());
  std::vector<Source> sources;
  for (const auto& gradient : gradients) {
    const auto from = gradient.scalar_type();
    const auto to = matrices.scalar_type();
    sources.push_back(
        {static_cast<const char*>(gradient.const_data_ptr()),
         static_cast<int64_t>(c10::elementSize(from)),
         from == to ? nullptr : rows.plain[cpu::dtype_index(from)][cpu::dtype_index(to)]});
  }
  with_dtype(matrices, [&](auto number) {
    using T = decltype(number);
    run_left<T>(
        Shape(matrices), [&](int64_t matrix) { return sources[matrix]; },
        matrices.mutable_data_ptr<T>(), adds, right.const_data_ptr<T>(), left.mutable_data_ptr<T>(),
        right.size(1));
  });
}

void right_on_cpu(const at::Tensor& matrices, const at::Tensor& left, const at::Tensor& right,
                  bool subtracts) {
  with_dtype(matrices, [&](auto number) {
    using T = decltype(number);
    // The matrices are written only if `subtracts` is set.
    auto* const data =
        subtracts ? matrices.mutable_data_ptr<T>() : const_cast<T*>(matrices.const_data_ptr<T>());
    run_right<T>(Shape(matrices), data, left.const_data_ptr<T>(), right.mutable_data_ptr<T>(),
                 left.size(1), subtracts);
  });
}

void product_on_cpu(const at::Tensor& left, const at::Tensor& right, const at::Tensor& matrices) {
  // Decides by the whole storage, since all of it is written about now.
  const bool streamed = static_cast<int64_t>(matrices.storage().nbytes()) >= cpu::streaming_bytes();
  with_dtype(matrices, [&](auto number) {
    using T = decltype(number);
    run_product<T>(Shape(matrices), left.const_data_ptr<T>(), right.const_data_ptr<T>(),
                   matrices.mutable_data_ptr<T>(), left.size(1), streamed);
  });
}

}  // namespace commhook::low_rank
