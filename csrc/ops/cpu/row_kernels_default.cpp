// Row kernels for any processor: plain C++, vectorised as far as the compiler can do that.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "ops/cpu/row_kernels.h"

namespace commhook::cpu {
namespace plain {

constexpr int64_t kWidth = 1;
using Vec = float;

template <typename T>
inline Vec load(const T* p, int64_t) {
  return static_cast<float>(*p);
}
template <bool kStream, typename T>
inline void store(T* p, Vec v, int64_t) {
  *p = static_cast<T>(v);
}
inline Vec multiply(Vec v, float scale) { return v * scale; }
inline void fence() {}

template <typename To>
struct Measure {
  double sum_of_squares = 0;
  int64_t nonfinite = 0;

  void add(Vec v, int64_t) {
    sum_of_squares += static_cast<double>(v) * static_cast<double>(v);
    nonfinite += !(__builtin_fabsf(static_cast<float>(static_cast<To>(v))) <= __FLT_MAX__);
  }
  void finish(RowStats* stats) const {
    stats->sum_of_squares += sum_of_squares;
    stats->nonfinite_count += nonfinite;
  }
};

#include "ops/cpu/row_kernels.inl"

}  // namespace plain

const RowKernels kRowKernelsDefault = plain::kKernels;

}  // namespace commhook::cpu
