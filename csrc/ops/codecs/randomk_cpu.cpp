// Values at random places, on the CPU: a pass over all values, which writes the error and looks for
// what is not finite, then one over the entries of the message.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "ops/codecs/codec_checks.h"
#include "ops/codecs/float_bits.h"
#include "ops/codecs/randomk.h"
#include "ops/cpu/blocks.h"
#include "ops/cpu/capability.h"

namespace commhook::randomk {
namespace {

constexpr int64_t kPiece = cpu::kMaxBlock;  // values that stay in the first-level cache
constexpr int64_t kBatch = 1024;            // entries whose indices are drawn together
// Below these a thread costs more to wake than it saves.
constexpr int64_t kGrainElements = 64 * 1024;
constexpr int64_t kGrainEntries = 4 * kBatch;

struct Kernels {
  // The indices of the entries [first, first + n), at most kBatch.
  void (*draw_indices)(const Draw& draw, uint32_t first, int64_t n, uint32_t* indices);
  // Writes p = value * scale + error over the error, but 0 where p is not finite; returns the
  // largest magnitude of p, as bits.
  uint32_t (*compensate)(const float* values, int64_t n, float scale, float* error);
  // The largest magnitude of value * scale, as bits.
  uint32_t (*largest)(const float* values, int64_t n, float scale);
};

#define COMMHOOK_KERNELS "ops/codecs/randomk_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

// Whether all values are finite, when scaled and added to the error, which they are.
bool are_finite(const cpu::Segments& segments, float scale, float* error) {
  std::atomic<bool> result{true};
  const Kernels& kernels = COMMHOOK_CHOOSE(kKernels);
  at::parallel_for(0, segments.total(), kGrainElements, [&](int64_t begin, int64_t end) {
    uint32_t most = 0;
    cpu::for_each_block(segments, begin, end, kPiece, cpu::row_kernels(cpu::capability()),
                        [&](const float* values, int64_t position, int64_t count) {
                          const uint32_t own =
                              error == nullptr
                                  ? kernels.largest(values, count, scale)
                                  : kernels.compensate(values, count, scale, error + position);
                          most = std::max(most, own);
                        });
    if (most >= kInfinity) {
      result.store(false, std::memory_order_relaxed);
    }
  });
  return result.load(std::memory_order_relaxed);
}

// Calls visit(entry, index) for all entries.
template <typename Visit>
void for_each_entry(const Draw& draw, int64_t count, const Visit& visit) {
  at::parallel_for(0, count, kGrainEntries, [&](int64_t begin, int64_t end) {
    alignas(64) uint32_t indices[kBatch];
    for (int64_t first = begin; first < end; first += kBatch) {
      const int64_t n = std::min(kBatch, end - first);
      COMMHOOK_CHOOSE(kKernels).draw_indices(draw, static_cast<uint32_t>(first), n, indices);
      for (int64_t i = 0; i < n; ++i) {
        visit(first + i, static_cast<int64_t>(indices[i]));
      }
    }
  });
}

constexpr int kFloat = 1;  // dtype_index(at::kFloat)

float value_at(const cpu::Segments& segments, const cpu::RowKernels& kernels, int64_t index) {
  float value = 0.0f;
  segments.walk(
      index, index + 1,
      [&](const cpu::Segment& segment, const char* data, int64_t, int64_t) {
        kernels.plain[segment.dtype][kFloat](data, &value, 1, 1.0, nullptr);
      },
      [&](const cpu::Segment& segment, int64_t position, int64_t) {
        alignas(8) char element[sizeof(double)];
        cpu::gather(segment, position, 1, element);
        kernels.plain[segment.dtype][kFloat](element, &value, 1, 1.0, nullptr);
      });
  return value;
}

void set_value_at(const cpu::Segments& segments, const cpu::RowKernels& kernels, int64_t index,
                  float value) {
  segments.walk(
      index, index + 1,
      [&](const cpu::Segment& segment, char* data, int64_t, int64_t) {
        kernels.plain[kFloat][segment.dtype](&value, data, 1, 1.0, nullptr);
      },
      [&](const cpu::Segment& segment, int64_t position, int64_t) {
        alignas(8) char element[sizeof(double)];
        kernels.plain[kFloat][segment.dtype](&value, element, 1, 1.0, nullptr);
        cpu::scatter(segment, position, 1, element);
      });
}

}  // namespace

void encode_on_cpu(at::TensorList tensors, const at::Tensor& message, const Draw& draw,
                   double scale, const std::optional<at::Tensor>& error) {
  const cpu::Segments segments(tensors);
  const auto& kernels = cpu::row_kernels(cpu::capability());
  const auto factor = static_cast<float>(scale);
  float* const lost = codecs::is_there(error) ? error->mutable_data_ptr<float>() : nullptr;
  auto* const values = reinterpret_cast<float*>(message.mutable_data_ptr<uint8_t>());
  const int64_t count = message.numel() / kBytesOfEntry;
  if (!are_finite(segments, factor, lost)) {
    std::fill(values, values + count, float_of(kNaN));
  } else if (lost == nullptr) {
    for_each_entry(draw, count, [&](int64_t entry, int64_t index) {
      values[entry] = value_at(segments, kernels, index) * factor;
    });
  } else {
    for_each_entry(draw, count, [&](int64_t entry, int64_t index) {
      values[entry] = lost[index];
      lost[index] = 0.0f;
    });
  }
}

void decode_on_cpu(const at::Tensor& message, at::TensorList tensors, const Draw& draw) {
  for (const auto& tensor : tensors) {
    tensor.mutable_data_ptr();  // a lazily copied storage becomes the tensor's own here
  }
  const cpu::Segments segments(tensors);
  const auto& kernels = cpu::row_kernels(cpu::capability());
  at::parallel_for(0, segments.total(), kGrainElements, [&](int64_t begin, int64_t end) {
    cpu::write_each_block(
        segments, begin, end, kPiece, kernels,
        [](float* values, int64_t, int64_t count) { std::fill(values, values + count, 0.0f); });
  });
  const auto* const values = reinterpret_cast<const float*>(message.const_data_ptr<uint8_t>());
  for_each_entry(draw, message.numel() / kBytesOfEntry, [&](int64_t entry, int64_t index) {
    set_value_at(segments, kernels, index, values[entry]);
  });
}

}  // namespace commhook::randomk
