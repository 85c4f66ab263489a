// The largest values of each chunk, on CUDA: one pass over the tensors. A block of threads holds
// the values of whole chunks in shared memory until their message is written.
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "compensate.cuh"
#include "ops/bucket/bucket.h"
#include "ops/codecs/chunk_topk.h"
#include "rounding.cuh"
#include "sources.h"

namespace commhook::cuda {
namespace {

using chunk_topk::Form;

// The values of a block of threads: whole chunks. A chunk belongs to several warps, to one, or to a
// part of one.
constexpr int kBlockValues = kTileValues * kWarpsPerBlock;
static_assert(kBlockValues == chunk_topk::kLargestChunk);
constexpr int kMostChunks = kBlockValues / chunk_topk::kLeastChunk;
constexpr int kMaskWords = kBlockValues / 32;
constexpr int kBlockQuads = kBlockValues / kQuadValues;
// The most words in the messages of a block's chunks: 4,096 entries of 12 and 8 bits, or 64 chunks
// with 64 entries of 6 and 8 bits.
constexpr int kMostWords = 1 + 4096 * 12 / 32 + 4096 * 8 / 32;
static_assert(kMostWords >= kMostChunks * (1 + 64 * 6 / 32 + 64 * 8 / 32));

// The shared memory of a block of threads. The groups' largest ranks are read before the first word
// of a message is written.
struct Shared {
  Quad values[kBlockQuads];
  union {
    int32_t largest[kBlockQuads];
    uint32_t words[kMostWords];
  };
  uint16_t candidates[kBlockValues];  // places in the block; each chunk's begin at its first place
  int32_t counts[kMostChunks];        // of candidates
  int32_t bounds[kMostChunks];        // the least rank of a candidate
  uint32_t masks[kMaskWords];         // which values are sent
  int32_t before[kMaskWords];         // number of sent values in the chunk before those of a mask
};

// The number of values in a group with a common largest rank: those of a lane, or of a quad. 1 if
// there would be fewer than two groups for each value that is sent; then groups are not used.
__device__ int group_values(const Form& form) {
  constexpr int kLaneValues = kTileQuads * kQuadValues;
  if (form.chunk >= kTileValues && form.chunk >= 2 * kLaneValues * form.k) {
    return kLaneValues;
  }
  return form.chunk >= 2 * kQuadValues * form.k ? kQuadValues : 1;
}

__device__ int32_t largest_of(int32_t value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(kWholeWarp, value, distance));
  }
  return value;
}

__device__ int64_t sum_of(int64_t value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, distance);
  }
  return value;
}

// The largest number for which count(number) is at least `wanted`; the result may be up to
// `tolerance` less. low and high are its bounds.
template <typename Count>
__device__ int32_t find_least(int32_t wanted, int32_t low, int32_t high, int32_t tolerance,
                              const Count& count) {
#pragma unroll 1
  while (high - low > tolerance) {
    const int32_t middle = low + (high - low + 1) / 2;
    const int32_t found = count(middle);
    if (found == wanted) {
      return middle;
    }
    if (found > wanted) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// For a warp: a rank that at least as many groups reach as values are sent. groups: their largest
// ranks.
__device__ int32_t bound_of(const int32_t* groups, int count, int wanted, int lane) {
  constexpr int32_t kTolerance = 1 << 16;  // the search may stop at a somewhat lower rank
  int32_t most = 0;
  int32_t less = 0;  // the largest difference between all bits and a rank
  constexpr int32_t kAll = 0x7fffffff;
#pragma unroll 1
  for (int g = lane; g < count; g += kWarpSize) {
    most = max(most, groups[g]);
    less = max(less, kAll - groups[g]);
  }
  const int32_t least = kAll - largest_of(less);
  const int32_t bound =
      find_least(wanted, least, largest_of(most), kTolerance, [&](int32_t middle) {
        int32_t found = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += kWarpSize) {
          const bool reaches = first + lane < count && groups[first + lane] >= middle;
          found += __popc(__ballot_sync(kWholeWarp, reaches));
        }
        return found;
      });
  return max(bound, 1);
}

// A lane's share of a chunk's candidates. The first few stay in registers.
class OwnCandidates {
 public:
  // candidates: their places in the block.
  __device__ OwnCandidates(const Shared& shared, const uint16_t* candidates, int count, int lane)
      : values_(reinterpret_cast<const float*>(shared.values)),
        candidates_(candidates),
        count_(count),
        lane_(lane) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int own = i * kWarpSize + lane;
      ranks_[i] = own < count ? chunk_topk::rank_of(values_[candidates[own]]) : -1;
    }
  }

  // The number of the warp's candidates with a rank and place that meet a condition.
  template <typename Condition>
  __device__ int32_t count(const Condition& condition) const {
    int32_t found = 0;
    for_each([&](bool is_there, int32_t rank, int own) {
      const bool is_met = is_there && condition(rank, own);
      found += __popc(__ballot_sync(kWholeWarp, is_met));
    });
    return found;
  }

  // Calls visit(is there, rank, number) for each candidate that a lane may have, on all lanes
  // together.
  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      visit(ranks_[i] >= 0, ranks_[i], i * kWarpSize + lane_);
    }
#pragma unroll 1
    for (int first = kKept * kWarpSize; first < count_; first += kWarpSize) {
      const int own = first + lane_;
      const bool is_there = own < count_;
      visit(is_there, is_there ? chunk_topk::rank_of(values_[candidates_[own]]) : -1, own);
    }
  }

  __device__ int place(int own) const { return candidates_[own]; }

 private:
  static constexpr int kKept = 4;
  const float* values_;
  const uint16_t* candidates_;
  int count_;
  int lane_;
  int32_t ranks_[kKept];
};

// Sent are all values above a rank, and those of that rank up to a place in the block.
struct Threshold {
  int32_t rank;
  int last_place;

  __device__ bool is_sent(int32_t own, int place) const {
    return own > rank || (own == rank && place <= last_place);
  }
};

__device__ Threshold threshold_of(const OwnCandidates& own, int count, int wanted, int32_t bound) {
  if (count <= wanted) {
    return {0, kBlockValues};
  }
  constexpr auto kMost = static_cast<int32_t>(kInfinity) + 1;
  const int32_t rank = find_least(wanted, bound, kMost, 0, [&](int32_t middle) {
    return own.count([&](int32_t each, int) { return each >= middle; });
  });
  const int32_t above = own.count([&](int32_t each, int) { return each > rank; });
  const int32_t ties = wanted - above;
  const int32_t equal = own.count([&](int32_t each, int) { return each == rank; });
  if (equal == ties) {
    return {rank, kBlockValues};
  }
  // The least place up to which there are enough ties: searches for the largest negated place.
  const int32_t last = -find_least(ties, -(kBlockValues - 1), 0, 0, [&](int32_t middle) {
    return own.count(
        [&](int32_t each, int number) { return each == rank && own.place(number) <= -middle; });
  });
  return {rank, last};
}

// Adds a field to words that contain zeros there.
__device__ void put(uint32_t* words, int bit, uint32_t field) {
  const uint64_t both = uint64_t{field} << (bit % 32);
  atomicOr(words + bit / 32, static_cast<uint32_t>(both));
  if (both >> 32 != 0) {
    atomicOr(words + bit / 32 + 1, static_cast<uint32_t>(both >> 32));
  }
}

// The levels for the values that a warp's lanes send. visit(add) calls add(rank) for each of this
// lane's values.
template <typename Visit>
__device__ uint32_t levels_of(int count, int bits, const Visit& visit) {
  if (count == 0) {
    return 0;
  }
  constexpr int32_t kAll = 0x7fffffff;
  int32_t largest = 0;
  int32_t less = 0;
  visit([&](int32_t rank) {
    largest = max(largest, rank);
    less = max(less, kAll - rank);
  });
  largest = largest_of(largest);
  const int32_t least = kAll - largest_of(less);
  if (largest >= static_cast<int32_t>(kInfinity)) {
    return chunk_topk::kNoLevels;
  }
  if (bits > 2) {
    return chunk_topk::outer_levels(least, largest);
  }
  const int32_t exponent = chunk_topk::exponent_of(largest);
  chunk_topk::Sums sums{0, 0, count, 0};
  visit([&](int32_t rank) { sums.all += chunk_topk::fixed_of(rank, exponent); });
  sums.all = sum_of(sums.all);
  int64_t split = chunk_topk::first_split(chunk_topk::fixed_of(least, exponent),
                                          chunk_topk::fixed_of(largest, exponent));
  chunk_topk::Means means{0.0f, 0.0f};
#pragma unroll 1
  for (int round = 0; round < chunk_topk::kRounds; ++round) {
    int64_t large = 0;
    int32_t large_count = 0;
    visit([&](int32_t rank) {
      const int64_t fixed = chunk_topk::fixed_of(rank, exponent);
      large += fixed > split ? fixed : 0;
      large_count += fixed > split ? 1 : 0;
    });
    sums.large = sum_of(large);
    sums.large_count = static_cast<int32_t>(sum_of(large_count));
    means = chunk_topk::means_of(sums);
    split = chunk_topk::next_split(means);
  }
  return chunk_topk::mean_levels(means, exponent);
}

// A chunk of a block, which one warp encodes.
struct ChunkPlace {
  int first;      // of the block's values
  int count;      // values
  int64_t begin;  // of all values
};

// Writes the message of a chunk, and the errors of the values that it sends.
template <ErrorKind kKind>
__device__ void write_chunk(Shared& shared, const Form& form, const ChunkPlace& chunk,
                            const Compensation& all, int number, uint32_t* message) {
  const int lane = lane_of_warp();
  const int entries = form.entries(chunk.count);
  const int candidates = shared.counts[number];
  const OwnCandidates own(shared, shared.candidates + chunk.first, candidates, lane);
  const auto threshold = threshold_of(own, candidates, entries, shared.bounds[number]);
  const auto for_each_sent = [&](const auto& visit) {
    own.for_each([&](bool is_there, int32_t rank, int each) {
      if (is_there) {
        const int place = own.place(each);
        if (threshold.is_sent(rank, place)) {
          visit(rank, place);
        }
      }
    });
  };
  uint32_t* const words = shared.words + number * form.words(form.k);
  const int count_of_words = form.words(entries);
#pragma unroll 1
  for (int i = lane; i < count_of_words; i += kWarpSize) {
    words[i] = 0;
  }
  for_each_sent(
      [&](int32_t, int place) { atomicOr(shared.masks + place / 32, 1u << (place % 32)); });
  __syncwarp();
  const int first_mask = chunk.first / 32;
  int sent = 0;
#pragma unroll 1
  for (int i = 0; i < form.chunk / 32; i += kWarpSize) {
    const bool is_own = i + lane < form.chunk / 32;
    const int32_t count = is_own ? __popc(shared.masks[first_mask + i + lane]) : 0;
    const int32_t up_to = sum_up_to(count);
    if (is_own) {
      shared.before[first_mask + i + lane] = sent + up_to - count;
    }
    sent += __shfl_sync(kWholeWarp, up_to, kWarpSize - 1);
  }
  __syncwarp();
  const uint32_t levels = levels_of(sent, form.bits, [&](const auto& add) {
    for_each_sent([&](int32_t rank, int) { add(rank); });
  });
  const bool is_finite = levels != chunk_topk::kNoLevels;
  if (lane == 0) {
    words[0] = levels;
  }
  uint32_t* const places = words + 1;
  uint32_t* const codes = places + form.place_words(entries);
  const auto* const values = reinterpret_cast<const float*>(shared.values);
  NarrowRounding round{};
  if constexpr (kKind == ErrorKind::kBFloat16) {
    round = narrow_rounding(all.rounding);
  }
  int32_t last = 0;
  for_each_sent([&](int32_t, int place) {
    const uint32_t mask = shared.masks[place / 32];
    const int entry = shared.before[place / 32] + __popc(mask & ((1u << (place % 32)) - 1));
    const int in_chunk = place - chunk.first;
    last = max(last, in_chunk);
    put(places, entry * form.place_bits, static_cast<uint32_t>(in_chunk));
    if (!is_finite) {
      return;
    }
    const float value = values[place];
    const uint32_t code = chunk_topk::code_of(value, levels, form.bits);
    put(codes, entry * form.bits, code);
    if constexpr (kKind != ErrorKind::kNone) {
      const float lost = value - chunk_topk::value_of(code, levels, form.bits);
      const int64_t at = chunk.begin + in_chunk;
      if constexpr (kKind == ErrorKind::kFloat) {
        all.p[at] = lost;
      } else {
        all.narrow_error[at] = round(lost, at);
      }
    }
  });
  last = largest_of(last);
#pragma unroll 1
  for (int entry = sent + lane; entry < entries; entry += kWarpSize) {
    put(places, entry * form.place_bits, static_cast<uint32_t>(last));
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < count_of_words; i += kWarpSize) {
    message[i] = words[i];
  }
}

// The minimum number of blocks in a multiprocessor. Without it, the compiler spills registers to
// make room for one more block.
constexpr int kEncodeBlocks = 4;

// Each block of threads encodes its chunks. first: the table's first value, counted over all
// values.
template <int kCapacity, ErrorKind kKind>
__global__ void __launch_bounds__(kThreads, kEncodeBlocks)
    encode_chunks_kernel(const __grid_constant__ TensorTable<const void, kCapacity> table,
                         Compensation all, int64_t first, Form form, uint32_t* message) {
  __shared__ Shared shared;
  const int warp = warp_of_block();
  const int lane = lane_of_warp();
  if (threadIdx.x < kMaskWords) {
    shared.masks[threadIdx.x] = 0;
  }
  if (threadIdx.x < kMostChunks) {
    shared.counts[threadIdx.x] = 0;
    shared.bounds[threadIdx.x] = 1;  // the least rank of a nonzero value
  }
  TileQuads own{};
  const int group = group_values(form);
  for_each_compensated_tile<kKind, false, false>(
      table, {all, first, 1}, shared.values, [&](int64_t, const TileQuads& p) {
        own = p;
#pragma unroll
        for (int k = 0; k < kTileQuads; ++k) {
          shared.values[(warp * kTileQuads + k) * kWarpSize + lane] = p.quads[k];
        }
      });
  int32_t ranks[kTileQuads][kQuadValues];
  int32_t of_quads[kTileQuads];
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
    of_quads[k] = 0;
#pragma unroll
    for (int i = 0; i < kQuadValues; ++i) {
      ranks[k][i] = chunk_topk::rank_of(own.quads[k].values[i]);
      of_quads[k] = max(of_quads[k], ranks[k][i]);
    }
  }
  if (group == kQuadValues) {
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
      shared.largest[(warp * kTileQuads + k) * kWarpSize + lane] = of_quads[k];
    }
  } else if (group > kQuadValues) {
    shared.largest[threadIdx.x] = max(max(of_quads[0], of_quads[1]), max(of_quads[2], of_quads[3]));
  }
  __syncthreads();
  const int64_t begin = int64_t{blockIdx.x} * kBlockValues;  // counted in the table
  const int count = static_cast<int>(min(table.total - begin, int64_t{kBlockValues}));
  const int chunks = (count + form.chunk - 1) >> form.place_bits;
  if (group > 1) {
    const int groups = form.chunk / group;
#pragma unroll 1
    for (int chunk = warp; chunk < chunks; chunk += kWarpsPerBlock) {
      const int32_t bound = bound_of(shared.largest + chunk * groups, groups, form.k, lane);
      if (lane == 0) {
        shared.bounds[chunk] = bound;
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
    const int place = ((warp * kTileQuads + k) * kWarpSize + lane) * kQuadValues;
    const int chunk = place >> form.place_bits;
    const int32_t bound = shared.bounds[chunk];
    if (of_quads[k] < bound) {
      continue;
    }
#pragma unroll
    for (int i = 0; i < kQuadValues; ++i) {
      if (ranks[k][i] >= bound) {
        const int32_t number = atomicAdd(shared.counts + chunk, 1);
        shared.candidates[chunk * form.chunk + number] = static_cast<uint16_t>(place + i);
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int chunk = warp; chunk < chunks; chunk += kWarpsPerBlock) {
    const int from = chunk * form.chunk;
    const int64_t at = first + begin + from;
    write_chunk<kKind>(shared, form, {from, min(form.chunk, count - from), at}, all, chunk,
                       message + (at >> form.place_bits) * form.words(form.k));
  }
}

// ---- decoding ----------------------------------------------------------------------------------

// A field of a message. Another word must follow its own.
__device__ uint32_t field_at(const uint32_t* words, int bit, int bits) {
  const uint64_t both = uint64_t{words[bit / 32 + 1]} << 32 | words[bit / 32];
  return static_cast<uint32_t>(both >> (bit % 32)) & ((1u << bits) - 1);
}

// An entry of a message.
struct Entry {
  int place;  // among the block's values; -1 for none
  float value;
};

// The entry `number` of a block's chunks. message: that of the first of these chunks.
__device__ Entry entry_at(const uint32_t* message, const Form& form, int chunks, int count,
                          int number) {
  const int chunk = number / form.k;
  const int entry = number - chunk * form.k;
  const int first = chunk * form.chunk;
  if (chunk >= chunks || entry >= min(form.k, count - first)) {
    return {-1, 0.0f};
  }
  const uint32_t* const words = message + chunk * form.words(form.k);
  const int entries = form.entries(min(form.chunk, count - first));
  const uint32_t place = field_at(words + 1, entry * form.place_bits, form.place_bits);
  if (entry > 0 && field_at(words + 1, (entry - 1) * form.place_bits, form.place_bits) >= place) {
    return {-1, 0.0f};
  }
  const uint32_t* const codes = words + 1 + form.place_words(entries);
  const uint32_t code =
      codes[entry * form.bits / 32] >> (entry * form.bits % 32) & ((1u << form.bits) - 1);
  return {first + static_cast<int>(place), chunk_topk::value_of(code, words[0], form.bits)};
}

// Writes the sums of the messages' values, times a scale. words: the words of a message.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    decode_chunks_kernel(const __grid_constant__ TensorTable<void, kCapacity> table, int64_t first,
                         Form form, const uint32_t* messages, int64_t count_of_messages,
                         int64_t words, float scale) {
  __shared__ Quad quads[kBlockQuads];
  auto* const values = reinterpret_cast<float*>(quads);
  const int64_t begin = int64_t{blockIdx.x} * kBlockValues;  // counted in the table
  const int count = static_cast<int>(min(table.total - begin, int64_t{kBlockValues}));
  const int chunks = (count + form.chunk - 1) >> form.place_bits;
  const int entries = chunks * form.k;
  const uint32_t* message = messages + ((first + begin) >> form.place_bits) * form.words(form.k);
  Entry next = entry_at(message, form, chunks, count, static_cast<int>(threadIdx.x));
#pragma unroll
  for (int k = 0; k < kTileQuads; ++k) {
    quads[k * kThreads + threadIdx.x] = {};
  }
#pragma unroll 1
  for (int64_t m = 0; m < count_of_messages; ++m) {
    __syncthreads();
    if (next.place >= 0) {
      values[next.place] = values[next.place] + next.value;
    }
#pragma unroll 1
    for (int number = kThreads + static_cast<int>(threadIdx.x); number < entries;
         number += kThreads) {
      const auto entry = entry_at(message, form, chunks, count, number);
      if (entry.place >= 0) {
        values[entry.place] = values[entry.place] + entry.value;
      }
    }
    message += words;
    if (m + 1 < count_of_messages) {  // before other lanes add the next message's values
      next = entry_at(message, form, chunks, count, static_cast<int>(threadIdx.x));
    }
  }
  __syncthreads();
  if (scale != 1.0f) {
    // Scaled here: unflatten_run would scale a float64 tensor in float64.
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
      Quad quad = quads[k * kThreads + threadIdx.x];  // loaded at once
#pragma unroll
      for (float& value : quad.values) {
        value = value * scale;
      }
      quads[k * kThreads + threadIdx.x] = quad;
    }
    __syncthreads();
  }
  const int64_t from = begin + warp_of_block() * kTileValues;
  const Run run{from, min(table.total, from + kTileValues)};
  if (run.begin < run.end) {
    unflatten_run(table, values - begin, 1.0, run, lane_of_warp());
  }
}

// ---- the operators -----------------------------------------------------------------------------

void encode(at::TensorList tensors, const at::Tensor& message, int64_t k, int64_t chunk,
            int64_t bits, double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding) {
  constexpr const char* kOp = "chunk_topk_encode";
  const auto form = chunk_topk::check_encode(tensors, message, k, chunk, bits, error, rounding);
  if (message.numel() == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(message.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const CompensatedMemory memory(kOp, total_numel(tensors), scale, error, rounding,
                                 message.options(), false);
  auto* const words = reinterpret_cast<uint32_t*>(message.mutable_data_ptr<uint8_t>());
  launch_compensated(
      kOp, tensors, memory,
      [&](const auto& table, auto kind, int64_t first) {
        constexpr int kCapacity = std::decay_t<decltype(table)>::kCapacity;
        constexpr ErrorKind kKind = kind;
        encode_chunks_kernel<kCapacity, kKind>
            <<<blocks_for(table.total, kBlockValues), kThreads, 0, stream>>>(table, memory.work(),
                                                                             first, form, words);
      },
      kBlockValues);
}

void write_sum_of_messages(const char* op, const at::Tensor& messages, at::TensorList tensors,
                           const Form& form, double scale) {
  if (messages.numel() == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(messages.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Destinations destinations(op, tensors);
  const auto* const words = reinterpret_cast<const uint32_t*>(messages.const_data_ptr<uint8_t>());
  with_tables(destinations.segments(), kBlockValues, messages.options(),
              [&](const auto& table, int64_t first) {
                constexpr int kCapacity = std::decay_t<decltype(table)>::kCapacity;
                decode_chunks_kernel<kCapacity>
                    <<<blocks_for(table.total, kBlockValues), kThreads, 0, stream>>>(
                        table, first * kBlockValues, form, words, messages.size(0),
                        messages.size(1) / static_cast<int64_t>(sizeof(uint32_t)),
                        static_cast<float>(scale));
                C10_CUDA_KERNEL_LAUNCH_CHECK();
              });
  destinations.finish();
}

// Skips entries with a place beyond the values: to report them, the host would have to wait for the
// device.

void decode(const at::Tensor& message, at::TensorList tensors, int64_t k, int64_t chunk,
            int64_t bits) {
  const auto form = chunk_topk::check_decode(message, tensors, k, chunk, bits);
  write_sum_of_messages("chunk_topk_decode", message.view({1, message.numel()}), tensors, form,
                        1.0);
}

void decode_sum(const at::Tensor& messages, at::TensorList tensors, int64_t k, int64_t chunk,
                int64_t bits, double scale) {
  const auto form = chunk_topk::check_decode_sum(messages, tensors, k, chunk, bits);
  write_sum_of_messages("chunk_topk_decode_sum", messages, tensors, form, scale);
}

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  m.impl("chunk_topk_encode", encode);
  m.impl("chunk_topk_decode", decode);
  m.impl("chunk_topk_decode_sum", decode_sum);
}

}  // namespace
}  // namespace commhook::cuda
