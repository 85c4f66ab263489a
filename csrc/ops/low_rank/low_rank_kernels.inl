// The kernels of low_rank for one instruction set: see cpu/for_each_instruction_set.h.

// Vectors of values at any address, of the width that most processors have. Twice that is no
// faster, and slow on processors without it.
template <typename T>
struct Vectors {
  static constexpr int kBytes = 32;
  static constexpr int kSize = kBytes / sizeof(T);
  typedef T Values __attribute__((vector_size(kBytes)));
  typedef T Unaligned __attribute__((vector_size(kBytes), aligned(alignof(T)), may_alias));

  static inline __attribute__((always_inline)) const Unaligned& at(const T* values) {
    return *reinterpret_cast<const Unaligned*>(values);
  }
  static inline __attribute__((always_inline)) Unaligned& at(T* values) {
    return *reinterpret_cast<Unaligned*>(values);
  }
};

// For R directions: sums[j][column % kLanes] += value * factor[j][column]. The values are the given
// ones, or those of `memory` after the given ones are written or added there.
template <typename T, int R, bool kWrites, bool kAdds>
void add_products(const T* __restrict values, T* __restrict memory, const T* __restrict factor,
                  int64_t stride, int64_t n, T* __restrict sums) {
  using V = Vectors<T>;
  constexpr int kParts = kLanes<T> / V::kSize;
  typename V::Values lanes[R][kParts];
  for (int j = 0; j < R; ++j) {
    for (int i = 0; i < kParts; ++i) {
      lanes[j][i] = V::at(sums + j * kLanes<T> + i * V::kSize);
    }
  }
  int64_t c = 0;
  for (; c + kLanes<T> <= n; c += kLanes<T>) {
    for (int i = 0; i < kParts; ++i) {
      const int64_t at = c + i * V::kSize;
      typename V::Values v = V::at(values + at);
      if (kAdds) {
        v += V::at(memory + at);
      }
      if (kWrites) {
        V::at(memory + at) = v;
      }
      for (int j = 0; j < R; ++j) {
        lanes[j][i] += v * V::at(factor + j * stride + at);
      }
    }
  }
  for (int j = 0; j < R; ++j) {
    for (int i = 0; i < kParts; ++i) {
      V::at(sums + j * kLanes<T> + i * V::kSize) = lanes[j][i];
    }
  }
  for (int i = 0; c + i < n; ++i) {
    const T v = kAdds ? values[c + i] + memory[c + i] : values[c + i];
    if (kWrites) {
      memory[c + i] = v;
    }
    for (int j = 0; j < R; ++j) {
      sums[j * kLanes<T> + i] += v * factor[j * stride + c + i];
    }
  }
}

// For R directions and U rows: sums[j][column] += the sum over rows of row[column] * weights[j].
template <typename T, int R, int U>
void add_rows(const T* __restrict rows, int64_t row_stride, const T* __restrict weights,
              int64_t weight_stride, int64_t n, T* __restrict sums, int64_t sum_stride) {
  using V = Vectors<T>;
  T w[R][U];
  for (int j = 0; j < R; ++j) {
    for (int u = 0; u < U; ++u) {
      w[j][u] = weights[j * weight_stride + u];
    }
  }
  int64_t c = 0;
  for (; c + V::kSize <= n; c += V::kSize) {
    typename V::Values sum[R];
    for (int j = 0; j < R; ++j) {
      sum[j] = V::at(rows + c) * w[j][0];
    }
    for (int u = 1; u < U; ++u) {
      const typename V::Values v = V::at(rows + u * row_stride + c);
      for (int j = 0; j < R; ++j) {
        sum[j] += v * w[j][u];
      }
    }
    for (int j = 0; j < R; ++j) {
      V::at(sums + j * sum_stride + c) += sum[j];
    }
  }
  for (; c < n; ++c) {
    for (int j = 0; j < R; ++j) {
      T sum = rows[c] * w[j][0];
      for (int u = 1; u < U; ++u) {
        sum += rows[u * row_stride + c] * w[j][u];
      }
      sums[j * sum_stride + c] += sum;
    }
  }
}

// For R directions: row[column] -= weights[j] * factor[j][column].
template <typename T, int R>
void subtract(T* __restrict row, const T* __restrict weights, int64_t weight_stride,
              const T* __restrict factor, int64_t stride, int64_t n) {
  for (int64_t c = 0; c < n; ++c) {
    T v = row[c];
    for (int j = 0; j < R; ++j) {
      v -= weights[j * weight_stride] * factor[j * stride + c];
    }
    row[c] = v;
  }
}

// For R directions: row[column] = the sum of weights[j] * factor[j][column], or += that sum.
template <typename T, int R, bool kAdds>
void multiply(T* __restrict row, const T* __restrict weights, int64_t weight_stride,
              const T* __restrict factor, int64_t stride, int64_t n) {
  for (int64_t c = 0; c < n; ++c) {
    T v = weights[0] * factor[c];
    for (int j = 1; j < R; ++j) {
      v += weights[j * weight_stride] * factor[j * stride + c];
    }
    row[c] = kAdds ? row[c] + v : v;
  }
}

template <typename T, int R>
constexpr Directions<T> directions{
    add_products<T, R, false, false>,
    add_products<T, R, true, false>,
    add_products<T, R, true, true>,
    add_rows<T, R, 1>,
    add_rows<T, R, kRows>,
    subtract<T, R>,
    multiply<T, R, false>,
    multiply<T, R, true>,
};

template <typename T>
constexpr Directions<T> kDirections[kAtOnce] = {directions<T, 1>, directions<T, 2>,
                                                directions<T, 3>, directions<T, 4>};
