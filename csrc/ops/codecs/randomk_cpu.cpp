// Values at random places, on the CPU. One pass over all values writes the error and searches for
// values that are not finite. A second pass goes over the entries of the message.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "ops/codecs/codec_checks.h"
#include "ops/codecs/error_memory.h"
#include "ops/codecs/float_bits.h"
#include "ops/codecs/randomk.h"
#include "ops/cpu/blocks.h"
#include "ops/cpu/capability.h"

namespace commhook::randomk {
namespace {

constexpr int64_t kPiece = cpu::kMaxBlock;  // values that stay in the first-level cache
constexpr int64_t kBatch = 1024;            // entries with indices that are drawn together
// With fewer, waking a thread costs more than it saves.
constexpr int64_t kGrainElements = 64 * 1024;
constexpr int64_t kGrainEntries = 4 * kBatch;

struct Kernels {
  // The indices of the entries [first, first + n), at most kBatch.
  void (*draw_indices)(const Draw& draw, uint32_t first, int64_t n, uint32_t* indices);
  // Writes p = value * scale + error over the error, with 0 in place of values that are not finite.
  // Returns the largest magnitude of p, as bits.
  uint32_t (*compensate)(const float* values, int64_t n, float scale, float* error);
  // The largest magnitude of value * scale, as bits.
  uint32_t (*largest)(const float* values, int64_t n, float scale);
};

#define COMMHOOK_KERNELS "ops/codecs/randomk_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

// Adds the scaled values to the error, and returns whether all are finite. An error of 16 bits
// cannot hold the sum; then add(values, position, count) does this and returns the largest
// magnitude.
template <typename Add>
bool are_finite(const cpu::Segments& segments, float scale, const codecs::ErrorMemory& error,
                const Add& add) {
  std::atomic<bool> result{true};
  const Kernels& kernels = COMMHOOK_CHOOSE(kKernels);
  at::parallel_for(0, segments.total(), kGrainElements, [&](int64_t begin, int64_t end) {
    uint32_t most = 0;
    cpu::for_each_block(segments, begin, end, kPiece, cpu::row_kernels(cpu::capability()),
                        [&](const float* values, int64_t position, int64_t count) {
                          const uint32_t own = error.is_narrow() ? add(values, position, count)
                                               : error.is_there()
                                                   ? kernels.compensate(values, count, scale,
                                                                        error.in_place() + position)
                                                   : kernels.largest(values, count, scale);
                          most = std::max(most, own);
                        });
    if (most >= kInfinity) {
      result.store(false, std::memory_order_relaxed);
    }
  });
  return result.load(std::memory_order_relaxed);
}

// Calls visit(entry, locate(index)) for all entries. Locates all entries of a batch first, so that
// their data is prefetched.
template <typename Locate, typename Visit>
void for_each_entry(const Draw& draw, int64_t count, const Locate& locate, const Visit& visit) {
  at::parallel_for(0, count, kGrainEntries, [&](int64_t begin, int64_t end) {
    alignas(64) uint32_t indices[kBatch];
    decltype(locate(0)) places[kBatch];
    for (int64_t first = begin; first < end; first += kBatch) {
      const int64_t n = std::min(kBatch, end - first);
      COMMHOOK_CHOOSE(kKernels).draw_indices(draw, static_cast<uint32_t>(first), n, indices);
      for (int64_t i = 0; i < n; ++i) {
        places[i] = locate(static_cast<int64_t>(indices[i]));
      }
      for (int64_t i = 0; i < n; ++i) {
        visit(first + i, places[i]);
      }
    }
  });
}

// The entries of a message, sorted by the piece of kPiece values that holds their value.
class SortedEntries {
 public:
  struct Entry {
    uint32_t index;
    uint32_t entry;
  };

  SortedEntries(const Draw& draw, int64_t count)
      : entries_(count), begins_(draw.numel / kPiece + 2) {
    std::vector<uint32_t> indices(count);
    for_each_entry(
        draw, count, [](int64_t index) { return static_cast<uint32_t>(index); },
        [&](int64_t entry, uint32_t index) { indices[entry] = index; });
    for (const uint32_t index : indices) {
      ++begins_[index / kPiece + 1];
    }
    std::partial_sum(begins_.begin(), begins_.end(), begins_.begin());
    auto next = begins_;
    for (int64_t i = 0; i < count; ++i) {
      entries_[next[indices[i] / kPiece]++] = {indices[i], static_cast<uint32_t>(i)};
    }
  }

  const std::vector<Entry>& all() const { return entries_; }

  // Calls visit(index, entry) for the entries of the values [begin, end).
  template <typename Visit>
  void visit(int64_t begin, int64_t end, const Visit& visit) const {
    const int64_t last = begins_[(end - 1) / kPiece + 1];
    for (int64_t i = begins_[begin / kPiece]; i < last; ++i) {
      const int64_t index = entries_[i].index;
      if (index >= begin && index < end) {
        visit(index, entries_[i].entry);
      }
    }
  }

 private:
  std::vector<Entry> entries_;
  std::vector<int64_t> begins_;  // of each piece
};

// Writes the message with an error of 16 bits. Such an error could not keep the sent values between
// two passes, so the entries of a piece are written while its values are in the cache.
void encode_narrow(const cpu::Segments& segments, float scale, const Draw& draw,
                   const codecs::ErrorMemory& error, float* message, int64_t count) {
  const SortedEntries entries(draw, count);
  const Kernels& kernels = COMMHOOK_CHOOSE(kKernels);
  const bool is_good = are_finite(
      segments, scale, error, [&](const float* values, int64_t position, int64_t values_count) {
        alignas(64) float p[kPiece];
        uint32_t most = 0;
        for (int64_t i = 0; i < values_count; i += kPiece) {
          const int64_t n = std::min(kPiece, values_count - i);
          const int64_t begin = position + i;
          error.read(begin, n, p);
          most = std::max(most, kernels.compensate(values + i, n, scale, p));
          entries.visit(begin, begin + n, [&](int64_t index, uint32_t entry) {
            message[entry] = p[index - begin];
            p[index - begin] = 0.0f;
          });
          error.write(begin, n, p);
        }
        return most;
      });
  if (!is_good) {  // the error keeps what it had
    for (const auto& each : entries.all()) {
      error.write(each.index, 1, message + each.entry);
      message[each.entry] = float_of(kNaN);
    }
  }
}

// An element of a tensor.
struct Place {
  const cpu::Segment* segment;
  int64_t index;
  char* data;  // null if the tensor is not contiguous
};

auto locate_in(const cpu::Segments& segments) {
  return [&segments](int64_t index) -> Place {
    const auto& segment = segments.at(index);
    if (segment.dims > 0) {
      return {&segment, index, nullptr};
    }
    char* const data = segment.data + (index - segment.begin) * segment.element_size;
    __builtin_prefetch(data);
    return {&segment, index, data};
  };
}

constexpr int kFloat = 1;  // dtype_index(at::kFloat)

float value_at(const Place& place, const cpu::RowKernels& kernels) {
  alignas(8) char element[sizeof(double)];
  if (place.data == nullptr) {
    cpu::gather(*place.segment, place.index, 1, element);
  }
  float value = 0.0f;
  kernels.plain[place.segment->dtype][kFloat](place.data == nullptr ? element : place.data, &value,
                                              1, 1.0, nullptr);
  return value;
}

void set_value_at(const Place& place, const cpu::RowKernels& kernels, float value) {
  alignas(8) char element[sizeof(double)];
  kernels.plain[kFloat][place.segment->dtype](&value, place.data == nullptr ? element : place.data,
                                              1, 1.0, nullptr);
  if (place.data == nullptr) {
    cpu::scatter(*place.segment, place.index, 1, element);
  }
}

}  // namespace

void encode_on_cpu(at::TensorList tensors, const at::Tensor& message, const Draw& draw,
                   double scale, const std::optional<at::Tensor>& error) {
  const cpu::Segments segments(tensors);
  const auto& kernels = cpu::row_kernels(cpu::capability());
  const auto factor = static_cast<float>(scale);
  const codecs::ErrorMemory memory(error, {true, draw.seed0, draw.seed1, draw.step});
  float* const lost = memory.in_place();
  auto* const values = reinterpret_cast<float*>(message.mutable_data_ptr<uint8_t>());
  const int64_t count = message.numel() / kBytesOfEntry;
  if (memory.is_narrow()) {
    return encode_narrow(segments, factor, draw, memory, values, count);
  }
  const auto none = [](const float*, int64_t, int64_t) { return uint32_t{0}; };
  if (!are_finite(segments, factor, memory, none)) {
    std::fill(values, values + count, float_of(kNaN));
  } else if (lost == nullptr) {
    for_each_entry(draw, count, locate_in(segments), [&](int64_t entry, const Place& place) {
      values[entry] = value_at(place, kernels) * factor;
    });
  } else {
    const auto locate = [&](int64_t index) {
      __builtin_prefetch(lost + index);
      return lost + index;
    };
    for_each_entry(draw, count, locate, [&](int64_t entry, float* place) {
      values[entry] = *place;
      *place = 0.0f;
    });
  }
}

void decode_on_cpu(const at::Tensor& message, at::TensorList tensors, const Draw& draw) {
  for (const auto& tensor : tensors) {
    tensor.mutable_data_ptr();  // makes a lazily copied storage the tensor's own
  }
  const cpu::Segments segments(tensors);
  const auto& kernels = cpu::row_kernels(cpu::capability());
  at::parallel_for(0, segments.total(), kGrainElements, [&](int64_t begin, int64_t end) {
    cpu::write_each_block(segments, begin, end, kPiece, kernels,
                          [](float* values, int64_t, int64_t count, bool) {
                            std::fill(values, values + count, 0.0f);
                          });
  });
  const auto* const values = reinterpret_cast<const float*>(message.const_data_ptr<uint8_t>());
  for_each_entry(
      draw, message.numel() / kBytesOfEntry, locate_in(segments),
      [&](int64_t entry, const Place& place) { set_value_at(place, kernels, values[entry]); });
}

}  // namespace commhook::randomk
