// The largest values of each chunk, on the CPU. A chunk stays in the first-level cache while a
// kernel selects from it. The maxima of groups of values give a rank that enough values reach; the
// kernel then selects among the values that reach it.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "ops/codecs/chunk_topk.h"
#include "ops/codecs/error_memory.h"
#include "ops/cpu/blocks.h"
#include "ops/cpu/capability.h"

#ifdef COMMHOOK_X86_KERNELS
#include <immintrin.h>
#endif

namespace commhook::chunk_topk {
namespace {

static_assert(kLargestChunk <= cpu::kMaxBlock);

// Kernels for one chunk of n values.
struct Kernels {
  // error: null, or overwritten with the new error.
  void (*encode)(const float* values, int64_t n, const Form& form, float scale, float* error,
                 uint32_t* words);
  // Whether the places ascend and lie in the chunk.
  bool (*are_good)(const uint32_t* words, const Form& form, int64_t n);
  // Overwrites `values`, or adds to them.
  void (*decode)(const uint32_t* words, const Form& form, int64_t n, float* values);
  void (*add)(const uint32_t* words, const Form& form, int64_t n, float* values);
};

#define COMMHOOK_KERNELS "ops/codecs/chunk_topk_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

const Kernels& kernels_of(const Form& form) {
  return COMMHOOK_CHOOSE(kKernels)[__builtin_ctz(static_cast<unsigned>(form.bits))];
}

constexpr int64_t kGrainElements = 64 * 1024;  // with fewer, a thread costs more than it saves

// Calls visit(begin, end) on all threads, for ranges that begin at multiples of the largest chunk.
template <typename Visit>
void for_each_part(int64_t total, const Visit& visit) {
  constexpr int64_t kPiece = kLargestChunk;
  at::parallel_for(
      0, (total + kPiece - 1) / kPiece, kGrainElements / kPiece,
      [&](int64_t first, int64_t last) { visit(first * kPiece, std::min(total, last * kPiece)); });
}

}  // namespace

void encode_on_cpu(at::TensorList tensors, const at::Tensor& message, const Form& form,
                   double scale, const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding) {
  const cpu::Segments segments(tensors);
  const codecs::ErrorMemory memory(error, codecs::rounding_of(rounding));
  auto* const message_words = reinterpret_cast<uint32_t*>(message.mutable_data_ptr<uint8_t>());
  const int64_t each = form.words(form.k);
  const auto factor = static_cast<float>(scale);
  for_each_part(segments.total(), [&](int64_t begin, int64_t end) {
    const Kernels& kernels = kernels_of(form);
    alignas(64) float lost[kLargestChunk];
    cpu::for_each_block(segments, begin, end, form.chunk, cpu::row_kernels(cpu::capability()),
                        [&](const float* values, int64_t position, int64_t count) {
                          for (int64_t at = 0; at < count; at += form.chunk) {
                            const int64_t n = std::min<int64_t>(form.chunk, count - at);
                            const int64_t place = position + at;
                            uint32_t* const words = message_words + place / form.chunk * each;
                            if (!memory.is_narrow()) {
                              float* const own =
                                  memory.is_there() ? memory.in_place() + place : nullptr;
                              kernels.encode(values + at, n, form, factor, own, words);
                              continue;
                            }
                            memory.read(place, n, lost);
                            kernels.encode(values + at, n, form, factor, lost, words);
                            memory.write(place, n, lost);
                          }
                        });
  });
}

void decode_sum_on_cpu(const char* op, const at::Tensor& messages, at::TensorList tensors,
                       const Form& form, double scale) {
  for (const auto& tensor : tensors) {
    tensor.mutable_data_ptr();  // makes a lazily copied storage the tensor's own
  }
  const cpu::Segments segments(tensors);
  const int64_t total = segments.total();
  const int64_t count_of_messages = messages.size(0);
  const auto* const first = reinterpret_cast<const uint32_t*>(messages.const_data_ptr<uint8_t>());
  const int64_t each = form.words(form.k);
  const int64_t all = messages.size(1) / static_cast<int64_t>(sizeof(uint32_t));
  const auto words_at = [&](int64_t message, int64_t position) {
    return first + message * all + position / form.chunk * each;
  };
  std::atomic<bool> is_wrong{false};
  for_each_part(total, [&](int64_t begin, int64_t end) {
    const Kernels& kernels = kernels_of(form);
    for (int64_t message = 0; message < count_of_messages; ++message) {
      for (int64_t at = begin; at < end; at += form.chunk) {
        if (!kernels.are_good(words_at(message, at), form,
                              std::min<int64_t>(form.chunk, end - at))) {
          is_wrong = true;
        }
      }
    }
  });
  check_places(op, !is_wrong);
  const auto factor = static_cast<float>(scale);
  for_each_part(total, [&](int64_t begin, int64_t end) {
    const Kernels& kernels = kernels_of(form);
    cpu::write_each_block(segments, begin, end, form.chunk, cpu::row_kernels(cpu::capability()),
                          [&](float* values, int64_t position, int64_t count, bool) {
                            for (int64_t at = 0; at < count; at += form.chunk) {
                              const int64_t n = std::min<int64_t>(form.chunk, count - at);
                              float* const to = values + at;
                              std::fill(to, to + n, 0.0f);
                              kernels.decode(words_at(0, position + at), form, n, to);
                              for (int64_t message = 1; message < count_of_messages; ++message) {
                                kernels.add(words_at(message, position + at), form, n, to);
                              }
                              if (factor != 1.0f) {
                                for (int64_t i = 0; i < n; ++i) {
                                  to[i] *= factor;
                                }
                              }
                            }
                          });
  });
}

}  // namespace commhook::chunk_topk
