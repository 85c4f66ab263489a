// check_finite on the CPU: one pass over memory. Threads share elements, not tensors.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>

#include "ops/check/check.h"
#include "ops/cpu/row_kernels.h"
#include "ops/cpu/segments.h"

namespace commhook::cpu {
namespace {

int64_t count_range(const Segments& segments, int64_t begin, int64_t end,
                    const RowCounter (&counters)[kDtypes]) {
  int64_t count = 0;
  alignas(64) char piece[Segments::kPieceElements * sizeof(double)];
  segments.walk(
      begin, end,
      [&](const Segment& segment, const char* data, int64_t, int64_t length) {
        count += counters[segment.dtype](data, length);
      },
      [&](const Segment& segment, int64_t position, int64_t length) {
        gather(segment, position, length, piece);
        count += counters[segment.dtype](piece, length);
      });
  return count;
}

void check_finite(at::TensorList tensors, const at::Tensor& count) {
  if (capability() == Capability::kReference) {
    return reference::check_finite(tensors, count);
  }
  check_finite_arguments(tensors, count);
  auto [rows, others] = split_by_dtype(tensors);
  reference::check_finite(others, count);
  const Segments segments(rows);
  const auto& counters = row_kernels(capability()).count_nonfinite;
  std::atomic<int64_t> total{0};
  at::parallel_for(0, segments.total(), kGrainElements, [&](int64_t begin, int64_t end) {
    total += count_range(segments, begin, end, counters);
  });
  // Several backward passes may share a count.
  __atomic_fetch_add(count.mutable_data_ptr<int64_t>(), total.load(), __ATOMIC_RELAXED);
}

TORCH_LIBRARY_IMPL(commhook, CPU, m) { m.impl("check_finite", check_finite); }

}  // namespace
}  // namespace commhook::cpu
