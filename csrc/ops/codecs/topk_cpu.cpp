// The largest values, on the CPU. A sample gives a rank a little below the least that will be sent.
// One pass over memory collects the values that reach it as candidates; the values to send are
// selected among these. If the sample was wrong, two more passes count the values of each rank.
// Both ways send the same values.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "ops/codecs/error_memory.h"
#include "ops/codecs/topk.h"
#include "ops/cpu/blocks.h"
#include "ops/cpu/capability.h"

namespace commhook::topk {
namespace {

// ---- kernels -----------------------------------------------------------------------------------

constexpr int64_t kPiece = 4096;  // values that stay in the first-level cache
static_assert(kPiece <= cpu::kMaxBlock);

// A rank is found in two steps: each counts the values by one half of their rank.
constexpr int kLowBits = 16;
constexpr int32_t kLowMask = (1 << kLowBits) - 1;
constexpr int64_t kHighCounts = int64_t{1} << (31 - kLowBits);
constexpr int64_t kLowCounts = int64_t{1} << kLowBits;

// p: values * scale + error.
struct Kernels {
  // Writes p over the error.
  void (*compensate)(const float* values, int64_t n, float scale, float* error);
  // Returns p; stores it in `buffer` if needed.
  const float* (*scaled)(const float* values, int64_t n, float scale, const float* error,
                         float* buffer);
  // Appends the entries of rank `least` or more; of those of rank `least` only the first `*ties`.
  // Returns the number of entries.
  int64_t (*collect)(const float* p, int64_t n, int64_t position, int32_t least, int64_t* ties,
                     int32_t* indices, float* values);
  // count_high counts values by the high part of their rank; count_low counts those with a given
  // high part by the low part. Both add to `counts`.
  void (*count_high)(const float* p, int64_t n, uint32_t* counts);
  void (*count_low)(const float* p, int64_t n, int32_t high, uint32_t* counts);
  // Adds the number of values above a rank, and of that rank.
  void (*count_above)(const float* p, int64_t n, int32_t rank, int64_t* above, int64_t* equal);
  void (*drop_nonfinite)(float* error, int64_t n);
};

#define COMMHOOK_KERNELS "ops/codecs/topk_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

// ---- values ------------------------------------------------------------------------------------

// A part of the values, and its candidates, with ascending indices.
struct Part {
  int64_t begin;
  int64_t end;
  bool is_visited = false;
  std::unique_ptr<int32_t[]> indices;
  std::unique_ptr<float[]> values;
  int64_t count = 0;
  bool is_full = false;
  // For the entries that are sent: their first place in the message, and the number of ties.
  int64_t offset = 0;
  int64_t ties = 0;
};

using Parts = std::vector<Part>;

Parts split(int64_t total) {
  constexpr int64_t kGrainElements = 64 * 1024;  // with fewer, a thread costs more than it saves
  const int64_t parts =
      std::clamp<int64_t>(total / kGrainElements, 1, std::max(1, at::get_num_threads()));
  Parts found(parts);
  for (int64_t i = 0; i < parts; ++i) {
    found[i].begin = total / parts * i;
    found[i].end = i + 1 == parts ? total : total / parts * (i + 1);
  }
  return found;
}

// Calls visit(index, part) on all threads.
template <typename Visit>
void for_each_part(Parts& parts, const Visit& visit) {
  at::parallel_for(0, static_cast<int64_t>(parts.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      visit(i, parts[i]);
    }
  });
}

// The values p. With a float32 error, the first visit of a part writes them over the error, and
// later visits read them there. An error of 16 bits could not hold them, so it stays as it is.
class Values {
 public:
  Values(const cpu::Segments& segments, double scale, const codecs::ErrorMemory& error)
      : segments_(segments),
        scale_(static_cast<float>(scale)),
        memory_(error),
        error_(error.in_place()) {}

  int64_t total() const { return segments_.total(); }
  float* error() const { return error_; }

  // Calls visit(p, position, count) for pieces of a part, in order.
  template <typename Visit>
  void visit(Part& part, const Visit& visit) const {
    if (memory_.is_narrow()) {
      return for_each_piece(part, visit);
    }
    if (error_ != nullptr && part.is_visited) {
      for (int64_t at = part.begin; at < part.end; at += kPiece) {
        visit(error_ + at, at, std::min(kPiece, part.end - at));
      }
      return;
    }
    const Kernels& kernels = COMMHOOK_CHOOSE(kKernels);
    alignas(64) float buffer[kPiece];
    cpu::for_each_block(
        segments_, part.begin, part.end, kPiece, cpu::row_kernels(cpu::capability()),
        [&](const float* values, int64_t position, int64_t count) {
          for (int64_t at = 0; at < count; at += kPiece) {
            const int64_t n = std::min(kPiece, count - at);
            if (error_ != nullptr) {
              kernels.compensate(values + at, n, scale_, error_ + position + at);
              visit(error_ + position + at, position + at, n);
            } else {
              visit(kernels.scaled(values + at, n, scale_, nullptr, buffer), position + at, n);
            }
          }
        });
    part.is_visited = true;
  }

  // Replaces an error of 16 bits by p, except values that are sent and, if `drops`, values that are
  // not finite.
  void keep(Parts& parts, const int32_t* indices, int64_t count, bool drops) const {
    const Kernels& kernels = COMMHOOK_CHOOSE(kKernels);
    for_each_part(parts, [&](int64_t, const Part& part) {
      const int32_t* const end = indices + count;
      const int32_t* next = std::lower_bound(indices, end, part.begin);
      for_each_piece(part, [&](float* p, int64_t position, int64_t n) {
        for (; next != end && *next < position + n; ++next) {
          p[*next - position] = 0.0f;
        }
        if (drops) {
          kernels.drop_nonfinite(p, n);
        }
        memory_.write(position, n, p);
      });
    });
  }

  // Calls visit(p, count) for the elements [begin, end), at most kPiece. Only before any other
  // visit.
  template <typename Visit>
  void look_at(int64_t begin, int64_t end, const Visit& visit) const {
    const Kernels& kernels = COMMHOOK_CHOOSE(kKernels);
    alignas(64) float buffer[kPiece];
    cpu::for_each_block(segments_, begin, end, end - begin, cpu::row_kernels(cpu::capability()),
                        [&](const float* values, int64_t position, int64_t count) {
                          if (memory_.is_narrow()) {
                            memory_.read(position, count, buffer);
                            kernels.compensate(values, count, scale_, buffer);
                            return visit(buffer, count);
                          }
                          const float* const error =
                              error_ == nullptr ? nullptr : error_ + position;
                          visit(kernels.scaled(values, count, scale_, error, buffer), count);
                        });
  }

 private:
  // Calls visit(p, position, count) for pieces of a part, computed from an error of 16 bits.
  template <typename Visit>
  void for_each_piece(const Part& part, const Visit& visit) const {
    const Kernels& kernels = COMMHOOK_CHOOSE(kKernels);
    alignas(64) float p[kPiece];
    cpu::for_each_block(segments_, part.begin, part.end, kPiece,
                        cpu::row_kernels(cpu::capability()),
                        [&](const float* values, int64_t position, int64_t count) {
                          for (int64_t at = 0; at < count; at += kPiece) {
                            const int64_t n = std::min(kPiece, count - at);
                            memory_.read(position + at, n, p);
                            kernels.compensate(values + at, n, scale_, p);
                            visit(p, position + at, n);
                          }
                        });
  }

  const cpu::Segments& segments_;
  const float scale_;
  const codecs::ErrorMemory& memory_;
  float* const error_;  // null unless the error is float32
};

// ---- the least value that is sent ---------------------------------------------------------------

// All values above a rank are sent, and the first `ties` values of that rank.
struct Threshold {
  int32_t rank;
  int64_t ties;
};

// The index at which a count from the largest index down reaches `wanted`, and how many of that
// index remain to be taken.
struct Place {
  int32_t index;
  int64_t remaining;
};

Place find_place(const std::vector<uint32_t>& counts, int64_t size, int64_t wanted) {
  const auto tables = static_cast<int64_t>(counts.size()) / size;
  for (int64_t i = size - 1; i >= 0; --i) {
    int64_t count = 0;
    for (int64_t table = 0; table < tables; ++table) {
      count += counts[table * size + i];
    }
    if (count >= wanted) {
      return {static_cast<int32_t>(i), wanted};
    }
    wanted -= count;
  }
  TORCH_INTERNAL_ASSERT(false, "fewer values than are sent");
}

// count(part, high, counts) counts a part's values: by the high part of their rank if `high` is
// negative, else by the low part.
template <typename Count>
Threshold find_threshold(Parts& parts, int64_t wanted, const Count& count) {
  std::vector<uint32_t> counts(parts.size() * kHighCounts);
  for_each_part(parts,
                [&](int64_t i, Part& part) { count(part, -1, counts.data() + i * kHighCounts); });
  const Place high = find_place(counts, kHighCounts, wanted);
  counts.assign(parts.size() * kLowCounts, 0);
  for_each_part(parts, [&](int64_t i, Part& part) {
    count(part, high.index, counts.data() + i * kLowCounts);
  });
  const Place low = find_place(counts, kLowCounts, high.remaining);
  return {(high.index << kLowBits) | low.index, low.remaining};
}

void count_ranks(const float* p, int64_t n, int32_t high, uint32_t* counts) {
  const Kernels& kernels = COMMHOOK_CHOOSE(kKernels);
  if (high < 0) {
    kernels.count_high(p, n, counts);
  } else {
    kernels.count_low(p, n, high, counts);
  }
}

// Guesses a rank that probably a few more values reach than are sent; 0 if it cannot. Samples runs
// of values. Their places are spread evenly, with random offsets that are the same each time.
int32_t guess_least(const Values& values, int64_t wanted) {
  constexpr int64_t kRun = 16;  // a cache line
  constexpr int64_t kFewest = 32 * 1024;
  constexpr int64_t kMostRuns = 1024;
  const int64_t total = values.total();
  if (total < kFewest) {
    return 0;
  }
  const int64_t runs = std::min(kMostRuns, total / (32 * kRun));
  const int64_t room = total / runs;
  std::vector<uint32_t> counts(kHighCounts);
  uint32_t random = 1;
  for (int64_t run = 0; run < runs; ++run) {
    random = random * 1664525u + 1013904223u;
    const int64_t begin = run * room + static_cast<int64_t>((random >> 8) % (room - kRun + 1));
    values.look_at(begin, begin + kRun, [&](const float* p, int64_t n) {
      COMMHOOK_CHOOSE(kKernels).count_high(p, n, counts.data());
    });
  }
  // The expected number of sent values in the sample, plus four standard deviations.
  const double sampled = static_cast<double>(runs * kRun);
  const double expected = sampled * static_cast<double>(wanted) / static_cast<double>(total);
  const double reach = expected + 4 * std::sqrt(expected) + 8;
  if (reach >= sampled) {
    return 0;
  }
  const Place place = find_place(counts, kHighCounts, static_cast<int64_t>(reach));
  return std::max(1, place.index << kLowBits);
}

// ---- candidates --------------------------------------------------------------------------------

// Collects the candidates of rank `least` or more; of that rank only the first `ties` of each part.
// A part with more than `most` candidates is full, and stops.
void collect(const Values& values, Parts& parts, int32_t least, int64_t ties, int64_t most) {
  for_each_part(parts, [&](int64_t, Part& part) {
    const int64_t room = std::min(part.end - part.begin, most + kPiece);
    part.indices.reset(new int32_t[room]);
    part.values.reset(new float[room]);
    part.count = 0;
    part.is_full = false;
    int64_t left = ties;
    values.visit(part, [&](const float* p, int64_t position, int64_t n) {
      part.is_full = part.is_full || part.count > most;
      if (!part.is_full) {
        part.count += COMMHOOK_CHOOSE(kKernels).collect(p, n, position, least, &left,
                                                        part.indices.get() + part.count,
                                                        part.values.get() + part.count);
      }
    });
  });
}

// Collects at least the values that are sent; returns the threshold that selects these.
Threshold find_candidates(const Values& values, Parts& parts, int64_t wanted) {
  std::optional<Threshold> threshold;
  if (const int32_t least = guess_least(values, wanted); least > 0) {
    constexpr int64_t kAllTies = std::numeric_limits<int64_t>::max();
    collect(values, parts, least, kAllTies, 8 * wanted + kPiece);
    int64_t total = 0;
    bool is_full = false;
    for (const auto& part : parts) {
      total += part.count;
      is_full = is_full || part.is_full;
    }
    if (!is_full && total >= wanted) {
      return find_threshold(parts, wanted, [](const Part& part, int32_t high, uint32_t* counts) {
        count_ranks(part.values.get(), part.count, high, counts);
      });
    }
    if (!is_full && least == 1) {
      threshold = {0, wanted - total};  // all nonzero values, and some zeros
    }
  }
  if (!threshold) {
    threshold = find_threshold(parts, wanted, [&](Part& part, int32_t high, uint32_t* counts) {
      values.visit(part,
                   [&](const float* p, int64_t, int64_t n) { count_ranks(p, n, high, counts); });
    });
  }
  collect(values, parts, threshold->rank, threshold->ties, wanted);
  return *threshold;
}

// ---- the message -------------------------------------------------------------------------------

void write(Parts& parts, const Threshold& threshold, int32_t* indices, float* values,
           float* error) {
  for_each_part(parts, [&](int64_t, Part& part) {
    COMMHOOK_CHOOSE(kKernels).count_above(part.values.get(), part.count, threshold.rank,
                                          &part.offset, &part.ties);
  });
  int64_t offset = 0;
  int64_t ties = threshold.ties;
  for (auto& part : parts) {
    const int64_t above = part.offset;
    part.ties = std::min(part.ties, ties);
    ties -= part.ties;
    part.offset = offset;
    offset += above + part.ties;
  }
  for_each_part(parts, [&](int64_t, const Part& part) {
    int64_t to = part.offset;
    int64_t left = part.ties;
    for (int64_t i = 0; i < part.count; ++i) {
      const float value = part.values[i];
      const int32_t rank = rank_of(value);
      if (rank < threshold.rank || (rank == threshold.rank && left-- <= 0)) {
        continue;
      }
      indices[to] = part.indices[i];
      values[to] = sent(value);
      ++to;
      if (error != nullptr) {
        error[part.indices[i]] = 0.0f;
      }
    }
  });
}

bool are_ascending(const int32_t* indices, int64_t count, int64_t end) {
  bool is_wrong = count > 0 && (indices[0] < 0 || indices[count - 1] >= end);
  for (int64_t i = 1; i < count; ++i) {
    is_wrong |= indices[i] <= indices[i - 1];
  }
  return !is_wrong;
}

}  // namespace

void encode_on_cpu(at::TensorList tensors, const at::Tensor& message, double scale,
                   const std::optional<at::Tensor>& error,
                   const std::optional<at::Tensor>& rounding) {
  const cpu::Segments segments(tensors);
  const int64_t count = message.numel() / kBytesOfEntry;
  if (count == 0) {
    return;
  }
  const codecs::ErrorMemory memory(error, codecs::rounding_of(rounding));
  const Values values(segments, scale, memory);
  Parts parts = split(values.total());
  const Threshold threshold = find_candidates(values, parts, count);
  auto* const indices = reinterpret_cast<int32_t*>(message.mutable_data_ptr<uint8_t>());
  write(parts, threshold, indices, reinterpret_cast<float*>(indices + count), values.error());
  // Then some infinities and NaNs may not have been sent.
  const bool drops = threshold.rank >= static_cast<int32_t>(kInfinity);
  if (memory.is_narrow()) {
    values.keep(parts, indices, count, drops);
  } else if (memory.is_there() && drops) {
    for_each_part(parts, [&](int64_t, const Part& part) {
      COMMHOOK_CHOOSE(kKernels).drop_nonfinite(values.error() + part.begin, part.end - part.begin);
    });
  }
}

void decode_sum_on_cpu(const char* op, const at::Tensor& messages, at::TensorList tensors,
                       double scale) {
  for (const auto& tensor : tensors) {
    tensor.mutable_data_ptr();  // makes a lazily copied storage the tensor's own
  }
  const cpu::Segments segments(tensors);
  const int64_t count_of_messages = messages.size(0);
  const int64_t count = messages.size(1) / kBytesOfEntry;
  const auto* const first = reinterpret_cast<const int32_t*>(messages.const_data_ptr<uint8_t>());
  const auto indices_of = [&](int64_t message) { return first + message * 2 * count; };
  for (int64_t message = 0; message < count_of_messages; ++message) {
    check_indices(op, are_ascending(indices_of(message), count, segments.total()),
                  segments.total());
  }
  const auto factor = static_cast<float>(scale);
  constexpr int64_t kGrainElements = 64 * 1024;
  at::parallel_for(0, segments.total(), kGrainElements, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> next(count_of_messages);
    for (int64_t message = 0; message < count_of_messages; ++message) {
      const auto* const indices = indices_of(message);
      next[message] = std::lower_bound(indices, indices + count, begin) - indices;
    }
    cpu::write_each_block(
        segments, begin, end, kPiece, cpu::row_kernels(cpu::capability()),
        [&](float* values, int64_t position, int64_t n, bool) {
          for (int64_t at = 0; at < n; at += kPiece) {
            const int64_t stop = std::min(n, at + kPiece);
            std::fill(values + at, values + stop, 0.0f);
            for (int64_t message = 0; message < count_of_messages; ++message) {
              const auto* const indices = indices_of(message);
              const auto* const sent_values = reinterpret_cast<const float*>(indices + count);
              int64_t i = next[message];
              for (; i < count && indices[i] < position + stop; ++i) {
                float& value = values[indices[i] - position];
                value = count_of_messages == 1 ? sent_values[i] : value + sent_values[i];
              }
              next[message] = i;
            }
            if (factor != 1.0f) {
              for (int64_t i = at; i < stop; ++i) {
                values[i] *= factor;
              }
            }
          }
        });
  });
}

}  // namespace commhook::topk
