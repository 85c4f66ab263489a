// The bucket operators on the CPU: one pass over memory. Threads share elements, not tensors.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "ops/bucket/bucket.h"
#include "ops/cpu/row_kernels.h"
#include "ops/cpu/segments.h"
#include "ops/cpu/streaming.h"

namespace commhook::cpu {
namespace {

// Sums are taken over chunks of this size and then added in order, so that they do not depend on
// the number of threads.
constexpr int64_t kChunkElements = 32 * 1024;

using Table = RowKernel[kDtypes][kDtypes];

const Table& choose(const RowKernels& kernels, bool streamed, bool measured) {
  if (measured) {
    return streamed ? kernels.streamed_measured : kernels.measured;
  }
  return streamed ? kernels.streamed : kernels.plain;
}

// Elements [begin, end) of the bucket, from the tensors into the buffer.
void flatten_range(const Segments& segments, int64_t begin, int64_t end, char* buffer,
                   at::ScalarType to, double scale, const Table& kernels, RowStats* stats) {
  const int column = dtype_index(to);
  const auto width = static_cast<int64_t>(c10::elementSize(to));
  alignas(64) char piece[Segments::kPieceElements * sizeof(double)];
  segments.walk(
      begin, end,
      [&](const Segment& segment, const char* data, int64_t position, int64_t count) {
        kernels[segment.dtype][column](data, buffer + position * width, count, scale, stats);
      },
      [&](const Segment& segment, int64_t position, int64_t count) {
        gather(segment, position, count, piece);
        kernels[segment.dtype][column](piece, buffer + position * width, count, scale, stats);
      });
}

// Copies elements [begin, end) of the bucket from the buffer into the tensors. piece_kernels must
// not stream: their output is scattered from the first-level cache immediately.
void unflatten_range(const Segments& segments, int64_t begin, int64_t end, const char* buffer,
                     at::ScalarType from, double scale, const Table& kernels,
                     const Table& piece_kernels) {
  const int row = dtype_index(from);
  const auto width = static_cast<int64_t>(c10::elementSize(from));
  alignas(64) char piece[Segments::kPieceElements * sizeof(double)];
  segments.walk(
      begin, end,
      [&](const Segment& segment, char* data, int64_t position, int64_t count) {
        kernels[row][segment.dtype](buffer + position * width, data, count, scale, nullptr);
      },
      [&](const Segment& segment, int64_t position, int64_t count) {
        piece_kernels[row][segment.dtype](buffer + position * width, piece, count, scale, nullptr);
        scatter(segment, position, count, piece);
      });
}

void run_flatten(at::TensorList tensors, double scale, const at::Tensor& buffer) {
  const Segments segments(tensors);
  const auto& kernels = choose(row_kernels(capability()),
                               copies_past_caches(bytes_of(tensors), bytes_of(buffer)), false);
  auto* data = static_cast<char*>(buffer.mutable_data_ptr());
  at::parallel_for(0, segments.total(), kGrainElements, [&](int64_t begin, int64_t end) {
    flatten_range(segments, begin, end, data, buffer.scalar_type(), scale, kernels, nullptr);
  });
}

at::Tensor flatten(at::TensorList tensors, double scale, std::optional<at::ScalarType> dtype) {
  if (capability() == Capability::kReference) {
    return reference::flatten(tensors, scale, dtype);
  }
  const auto to = check_flatten("flatten", tensors, dtype);
  auto buffer = at::empty({total_numel(tensors)}, tensors[0].options().dtype(to));
  run_flatten(tensors, scale, buffer);
  return buffer;
}

at::Tensor& flatten_out(at::TensorList tensors, double scale, at::Tensor& out) {
  if (capability() == Capability::kReference) {
    return reference::flatten_out(tensors, scale, out);
  }
  check_flatten_out("flatten", tensors, out);
  run_flatten(tensors, scale, out);
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flatten_stats(at::TensorList tensors, double scale,
                                                             std::optional<at::ScalarType> dtype) {
  if (capability() == Capability::kReference) {
    return reference::flatten_stats(tensors, scale, dtype);
  }
  const auto to = check_flatten("flatten_stats", tensors, dtype);
  auto buffer = at::empty({total_numel(tensors)}, tensors[0].options().dtype(to));
  const Segments segments(tensors);
  const auto& kernels = choose(row_kernels(capability()),
                               copies_past_caches(bytes_of(tensors), bytes_of(buffer)), true);
  auto* data = static_cast<char*>(buffer.mutable_data_ptr());
  const int64_t total = segments.total();
  const int64_t chunks = (total + kChunkElements - 1) / kChunkElements;
  std::vector<RowStats> partial(chunks);
  at::parallel_for(0, chunks, kGrainElements / kChunkElements, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t begin = chunk * kChunkElements;
      flatten_range(segments, begin, std::min(total, begin + kChunkElements), data, to, scale,
                    kernels, &partial[chunk]);
    }
  });
  RowStats sum;
  for (const auto& stats : partial) {
    sum.sum_of_squares += stats.sum_of_squares;
    sum.nonfinite_count += stats.nonfinite_count;
  }
  const auto options = tensors[0].options();
  return {std::move(buffer), at::scalar_tensor(sum.sum_of_squares, options.dtype(at::kDouble)),
          at::scalar_tensor(sum.nonfinite_count, options.dtype(at::kLong))};
}

void run_unflatten(const at::Tensor& buffer, at::TensorList tensors, double scale) {
  for (const auto& tensor : tensors) {
    tensor.mutable_data_ptr();  // makes a lazily copied storage the tensor's own
  }
  const Segments segments(tensors);
  const auto& all = row_kernels(capability());
  const auto& kernels = choose(all, copies_past_caches(bytes_of(buffer), bytes_of(tensors)), false);
  const auto* data = static_cast<const char*>(buffer.const_data_ptr());
  at::parallel_for(0, segments.total(), kGrainElements, [&](int64_t begin, int64_t end) {
    unflatten_range(segments, begin, end, data, buffer.scalar_type(), scale, kernels, all.plain);
  });
}

std::vector<at::Tensor> unflatten(const at::Tensor& buffer, at::TensorList like, double scale) {
  if (capability() == Capability::kReference) {
    return reference::unflatten(buffer, like, scale);
  }
  check_unflatten("unflatten", buffer, like, "like");
  auto tensors = empty_like(like);
  run_unflatten(buffer, tensors, scale);
  return tensors;
}

void unflatten_into(const at::Tensor& buffer, at::TensorList tensors, double scale) {
  if (capability() == Capability::kReference) {
    return reference::unflatten_into(buffer, tensors, scale);
  }
  check_unflatten_into("unflatten_into", buffer, tensors);
  run_unflatten(buffer, tensors, scale);
}

TORCH_LIBRARY_IMPL(commhook, CPU, m) {
  m.impl("flatten", flatten);
  m.impl("flatten.out", flatten_out);
  m.impl("flatten_stats", flatten_stats);
  m.impl("unflatten", unflatten);
  m.impl("unflatten_into", unflatten_into);
}

}  // namespace
}  // namespace commhook::cpu
