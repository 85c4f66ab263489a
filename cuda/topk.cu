// The values of largest magnitude, on CUDA. A pass over all values for each part of the least rank
// that is sent, one that counts, and one that writes the message.
#include <torch/library.h>

#include <algorithm>

#include "error_launch.h"
#include "flat.cuh"
#include "launch.cuh"
#include "ops/codecs/codec_checks.h"
#include "ops/codecs/topk.h"
#include "topk_select.h"

namespace commhook::cuda {
namespace {

// Values of a block of threads, one after the other. Parts that follow each other make a message's
// indices ascend.
constexpr int kPartQuads = 4;  // of a thread
constexpr int64_t kPartValues = kPartQuads * kQuadValues * kThreads;

// p = values * scale + error, in the place of the error or else of the values; null error for none.
__global__ void __launch_bounds__(kThreads)
    compensate_kernel(float* values, int64_t numel, float scale, float* error) {
  float* const to = error != nullptr ? error : values;
  const bool is_aligned = is_aligned_for_quads(to);
  for_each_quad(numel, [&](int64_t first) {
    put_quad(compensated_quad(values, scale, error, first, numel), to, first, numel, is_aligned);
  });
}

__global__ void __launch_bounds__(kThreads)
    count_ranks_kernel(const float* p, int64_t numel, int level, const RankState* state,
                       int32_t* counts) {
  __shared__ int32_t own[kRankBins];
  for (int i = threadIdx.x; i < kRankBins; i += kThreads) {
    own[i] = 0;
  }
  __syncthreads();
  const RankState known = *state;
  const bool is_aligned = is_aligned_for_quads(p);
  for_each_quad(numel, [&](int64_t first) {
    const Quad quad = quad_at(p, first, numel, is_aligned);
#pragma unroll
    for (int i = 0; i < kQuadValues; ++i) {
      const int bin = first + i < numel ? bin_of(topk::rank_of(quad.values[i]), level, known) : -1;
      if (bin >= 0) {
        atomicAdd(own + bin, 1);
      }
    }
  });
  __syncthreads();
  for (int i = threadIdx.x; i < kRankBins; i += kThreads) {
    if (own[i] != 0) {
      atomicAdd(counts + i, own[i]);
    }
  }
}

// A single block: the bin in which a count from the top comes to what is wanted. Leaves zeros.
__global__ void __launch_bounds__(kThreads)
    find_bin_kernel(int level, RankState* state, int32_t* counts) {
  constexpr int kEach = kRankBins / kThreads;
  __shared__ int32_t sums[kThreads];
  const int top = kRankBins - 1 - static_cast<int>(threadIdx.x) * kEach;
  int32_t sum = 0;
  for (int i = 0; i < kEach; ++i) {
    sum += counts[top - i];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t wanted = state->wanted;
    int thread = 0;
    while (thread < kThreads - 1 && sums[thread] < wanted) {
      wanted -= sums[thread++];
    }
    int bin = kRankBins - 1 - thread * kEach;
    while (bin > 0 && counts[bin] < wanted) {
      wanted -= counts[bin--];
    }
    *state = with_bin(*state, level, bin, wanted);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRankBins; i += kThreads) {
    counts[i] = 0;
  }
}

__device__ RankCounts sum(const RankCounts& a, const RankCounts& b) {
  return {a.above + b.above, a.equal + b.equal};
}

// Of the first `count` of four values.
__device__ RankCounts counts_of(const Quad& quad, int64_t count, int32_t least) {
  RankCounts counts{0, 0};
#pragma unroll
  for (int i = 0; i < kQuadValues; ++i) {
    const int32_t rank = i < count ? topk::rank_of(quad.values[i]) : -1;
    counts.above += rank > least ? 1 : 0;
    counts.equal += rank == least ? 1 : 0;
  }
  return counts;
}

__device__ RankCounts sum_of_warp(RankCounts counts) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    counts.above += __shfl_down_sync(0xffffffffu, counts.above, distance);
    counts.equal += __shfl_down_sync(0xffffffffu, counts.equal, distance);
  }
  return counts;
}

// Of this lane and those before it.
__device__ RankCounts sum_up_to_lane(RankCounts counts, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const RankCounts before{__shfl_up_sync(0xffffffffu, counts.above, distance),
                            __shfl_up_sync(0xffffffffu, counts.equal, distance)};
    if (lane >= distance) {
      counts = sum(counts, before);
    }
  }
  return counts;
}

// Of each part.
__global__ void __launch_bounds__(kThreads)
    count_parts_kernel(const float* p, int64_t numel, const RankState* state, RankCounts* counts) {
  const int32_t least = state->prefix;
  const int64_t begin = int64_t{blockIdx.x} * kPartValues;
  const int64_t end = min(numel, begin + kPartValues);
  const bool is_aligned = is_aligned_for_quads(p);
  RankCounts own{0, 0};
#pragma unroll
  for (int step = 0; step < kPartQuads; ++step) {
    const int64_t first = begin + (step * kThreads + threadIdx.x) * kQuadValues;
    own = sum(own, counts_of(quad_at(p, first, end, is_aligned), end - first, least));
  }
  own = sum_of_warp(own);
  __shared__ RankCounts of_warp[kWarpsPerBlock];
  if (threadIdx.x % kWarpSize == 0) {
    of_warp[threadIdx.x / kWarpSize] = own;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarpsPerBlock; ++warp) {
      own.above += of_warp[warp].above;
      own.equal += of_warp[warp].equal;
    }
    counts[blockIdx.x] = own;
  }
}

// A single block: replaces each part's counts by those of the parts before it.
__global__ void __launch_bounds__(kThreads) add_up_parts_kernel(RankCounts* counts, int64_t parts) {
  __shared__ RankCounts sums[kThreads];
  const int64_t each = (parts + kThreads - 1) / kThreads;
  const int64_t begin = min(parts, threadIdx.x * each);
  const int64_t end = min(parts, begin + each);
  RankCounts sum{0, 0};
  for (int64_t i = begin; i < end; ++i) {
    sum.above += counts[i].above;
    sum.equal += counts[i].equal;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  RankCounts before{0, 0};
  for (int thread = 0; thread < static_cast<int>(threadIdx.x); ++thread) {
    before.above += sums[thread].above;
    before.equal += sums[thread].equal;
  }
  for (int64_t i = begin; i < end; ++i) {
    const RankCounts own = counts[i];
    counts[i] = before;
    before.above += own.above;
    before.equal += own.equal;
  }
}

// before: of each part, what is before it. error: null for none.
__global__ void __launch_bounds__(kThreads)
    write_entries_kernel(const float* p, int64_t numel, const RankState* state,
                         const RankCounts* before, float* error, int32_t* indices, float* values) {
  const int32_t least = state->prefix;
  const int64_t begin = int64_t{blockIdx.x} * kPartValues;
  const int64_t end = min(numel, begin + kPartValues);
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  // The tie count needs no upper bound: no lane reads past the part's end.
  const auto part = part_of_message(before[blockIdx.x], {0, INT32_MAX}, state->wanted);
  const bool is_aligned = is_aligned_for_quads(p);
  __shared__ RankCounts of_warp[kWarpsPerBlock];
  RankCounts done{0, 0};
  for (int64_t from = begin; from < end; from += kThreads * kQuadValues) {
    const int64_t first = from + int64_t{threadIdx.x} * kQuadValues;
    const Quad quad = quad_at(p, first, end, is_aligned);
    const RankCounts mine = counts_of(quad, end - first, least);
    const RankCounts up_to = sum_up_to_lane(mine, lane);
    if (lane == kWarpSize - 1) {
      of_warp[warp] = up_to;
    }
    __syncthreads();
    RankCounts own{done.above + up_to.above - mine.above, done.equal + up_to.equal - mine.equal};
    for (int w = 0; w < kWarpsPerBlock; ++w) {
      if (w < warp) {
        own = sum(own, of_warp[w]);
      }
      done = sum(done, of_warp[w]);
    }
    __syncthreads();  // before the counts are written anew
#pragma unroll
    for (int i = 0; i < kQuadValues; ++i) {
      if (first + i >= end) {
        break;
      }
      const float value = quad.values[i];
      const int32_t rank = topk::rank_of(value);
      const int32_t entry = entry_of(rank, least, own, part);
      if (entry >= 0) {
        indices[entry] = static_cast<int32_t>(first + i);
        values[entry] = topk::sent(value);
      }
      if (error != nullptr && (entry >= 0 || rank >= static_cast<int32_t>(kInfinity))) {
        error[first + i] = 0.0f;
      }
      own.above += rank > least ? 1 : 0;
      own.equal += rank == least ? 1 : 0;
    }
  }
}

// Adds a message's values to `flat`, which holds those of the messages before it. `is_only`: of
// all.
__global__ void __launch_bounds__(kThreads)
    add_entries_kernel(const int32_t* indices, const float* values, int64_t count, bool is_only,
                       float* flat, int64_t numel) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) {
    return;
  }
  const int64_t index = indices[i];
  if (index >= 0 && index < numel) {
    flat[index] = is_only ? values[i] : flat[index] + values[i];
  }
}

unsigned blocks_for(int64_t count, int64_t each) {
  return static_cast<unsigned>((count + each - 1) / each);
}

void encode(at::TensorList tensors, const at::Tensor& message, double scale,
            const std::optional<at::Tensor>& error, const std::optional<at::Tensor>& rounding) {
  const int64_t numel = topk::check_encode(tensors, message, error, rounding);
  const int64_t count = message.numel() / topk::kBytesOfEntry;
  if (count == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(message.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto flat = flat_of("topk_encode", tensors);
  auto* const values = flat.mutable_data_ptr<float>();
  const WideError wide(error);
  auto* const lost = wide.data();
  const auto parts = blocks_for(numel, kPartValues);
  const auto options = message.options().dtype(at::kInt);
  const auto counts = at::zeros({kRankBins}, options);
  const auto state = at::empty({sizeof(RankState) / sizeof(int32_t)}, options);
  const auto of_parts = at::empty({2 * int64_t{parts}}, options);
  auto* const bins = counts.mutable_data_ptr<int32_t>();
  auto* const known = reinterpret_cast<RankState*>(state.mutable_data_ptr<int32_t>());
  auto* const before = reinterpret_cast<RankCounts*>(of_parts.mutable_data_ptr<int32_t>());
  state.fill_(count);  // all of it: the prefix is written before it is read
  const unsigned wave = std::min(
      parts,
      static_cast<unsigned>(at::cuda::getCurrentDeviceProperties()->multiProcessorCount * 8));
  compensate_kernel<<<wave, kThreads, 0, stream>>>(values, numel, static_cast<float>(scale), lost);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  const float* const p = lost == nullptr ? values : lost;
  for (int level = 0; level < kRankLevels; ++level) {
    count_ranks_kernel<<<wave, kThreads, 0, stream>>>(p, numel, level, known, bins);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    find_bin_kernel<<<1, kThreads, 0, stream>>>(level, known, bins);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  count_parts_kernel<<<parts, kThreads, 0, stream>>>(p, numel, known, before);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  add_up_parts_kernel<<<1, kThreads, 0, stream>>>(before, parts);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  auto* const indices = reinterpret_cast<int32_t*>(message.mutable_data_ptr<uint8_t>());
  write_entries_kernel<<<parts, kThreads, 0, stream>>>(p, numel, known, before, lost, indices,
                                                       reinterpret_cast<float*>(indices + count));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  wide.finish(codecs::is_there(rounding) ? rounding->const_data_ptr<int64_t>() : nullptr);
}

void write_sum_of_messages(const char* op, const at::Tensor& messages, at::TensorList tensors,
                           double scale) {
  const c10::cuda::CUDAGuard guard(messages.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const int64_t numel = total_numel(tensors);
  const int64_t count = messages.size(1) / topk::kBytesOfEntry;
  const auto flat = at::zeros({numel}, messages.options().dtype(at::kFloat));
  for (int64_t m = 0; m < messages.size(0) && count > 0; ++m) {
    const auto* const indices =
        reinterpret_cast<const int32_t*>(messages.const_data_ptr<uint8_t>()) + 2 * count * m;
    add_entries_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(
        indices, reinterpret_cast<const float*>(indices + count), count, messages.size(0) == 1,
        flat.mutable_data_ptr<float>(), numel);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  if (static_cast<float>(scale) != 1.0f) {
    flat.mul_(static_cast<double>(static_cast<float>(scale)));
  }
  give_flat(op, flat, tensors);
}

// Entries of indices that are none of a value are left out: to tell of them, the host would have to
// wait for the device.

void decode(const at::Tensor& message, at::TensorList tensors) {
  topk::check_decode(message, tensors);
  write_sum_of_messages("topk_decode", message.view({1, message.numel()}), tensors, 1.0);
}

void decode_sum(const at::Tensor& messages, at::TensorList tensors, double scale) {
  topk::check_decode_sum(messages, tensors);
  write_sum_of_messages("topk_decode_sum", messages, tensors, scale);
}

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  m.impl("topk_encode", encode);
  m.impl("topk_decode", decode);
  m.impl("topk_decode_sum", decode_sum);
}

}  // namespace
}  // namespace commhook::cuda
