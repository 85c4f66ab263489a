// The values of largest magnitude, on CUDA. One pass over the tensors computes p = values * scale +
// error, and counts. Two more passes over p load only groups with values that may be sent: one
// counts, the other writes the message.
#include <torch/library.h>

#include <algorithm>

#include "compensate.cuh"
#include "flat.cuh"
#include "ops/codecs/topk.h"
#include "topk_passes.cuh"

namespace commhook::cuda {
namespace {

constexpr int kTileGroups = kTileValues / kGroupValues;
static_assert(kTileGroups == kWarpSize);
constexpr int64_t kPartValues = int64_t{kTileValues} * kWarpsPerBlock;

// The memory that the passes share. All but the groups begins with zeros.
struct Selection {
  int32_t* high;      // counts by the upper bits of ranks, kHighBins
  int32_t* middle;    // of the lower bits, kMiddleBins
  int32_t* low;       // kLowBins
  int32_t* finished;  // finished blocks of each of the two passes that count
  int32_t* taken;     // parts that the third pass has taken
  RankState* upper;   // the upper bits of the least rank that is sent
  RankState* least;   // all bits of that rank
  uint64_t* parts;    // the state of each part
  uint16_t* groups;   // the largest rank of each kGroupValues values, in whole tiles
};

// Writes the largest rank of each group of a tile. Four lanes have a group's values in each quad k;
// each lane keeps one quad's values, and gives the others away.
__device__ void write_groups(const int32_t (&largest)[kTileQuads], uint16_t* groups) {
  const int lane = lane_of_warp();
  int32_t pair[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const bool is_odd = lane % 2 != 0;
    const int32_t given = is_odd ? largest[2 * k] : largest[2 * k + 1];
    const int32_t kept = is_odd ? largest[2 * k + 1] : largest[2 * k];
    pair[k] = max(kept, __shfl_xor_sync(kWholeWarp, given, 1));
  }
  const bool is_upper = lane % 4 >= 2;
  const int32_t given = is_upper ? pair[0] : pair[1];
  const int32_t kept = is_upper ? pair[1] : pair[0];
  groups[lane % 4 * (kWarpSize / 4) + lane / 4] =
      group_rank(max(kept, __shfl_xor_sync(kWholeWarp, given, 2)));
}

// The first pass. wanted: entries of the message.
template <int kCapacity, ErrorKind kKind>
__global__ void __launch_bounds__(kThreads)
    compensate_count_kernel(const __grid_constant__ TensorTable<const void, kCapacity> table,
                            CompensationPart part, Selection selection, int32_t wanted) {
  __shared__ Quad tiles[kBlockTileQuads];
  __shared__ int32_t own[kHighBins];
  for (int i = threadIdx.x; i < kHighBins; i += kThreads) {
    own[i] = 0;
  }
  __syncthreads();
  for_each_compensated_tile<kKind, true>(
      table, part, tiles, [&](int64_t place, const TileQuads& p) {
        int32_t largest[kTileQuads];
#pragma unroll
        for (int k = 0; k < kTileQuads; ++k) {
          largest[k] = 0;
#pragma unroll
          for (int i = 0; i < kQuadValues; ++i) {
            const int32_t rank = topk::rank_of(p.quads[k].values[i]);
            largest[k] = max(largest[k], rank);
            if (rank > kLowMask) {  // bin 0 has the rest, including zeros
              atomicAdd(own + (rank >> kLowBits), 1);
            }
          }
        }
        write_groups(largest, selection.groups + place / kGroupValues);
      });
  __syncthreads();
  for (int i = threadIdx.x; i < kHighBins; i += kThreads) {
    if (own[i] != 0) {
      atomicAdd(selection.high + i, own[i]);
    }
  }
  // Whether this is the last launch.
  const bool is_last = part.first + table.total == part.all.numel;
  if (is_last && is_last_block(selection.finished)) {
    const auto upper = find_bin<kHighBins>(selection.high, wanted);
    if (threadIdx.x == 0) {
      *selection.upper = upper;
    }
  }
}

// For a lane's group: the values with a rank above `least`, and those of that rank.
struct GroupMasks {
  uint32_t above;
  uint32_t equal;
};

// shift: lower bits that the comparison ignores.
__device__ GroupMasks masks_of(const float* p, int64_t first, int64_t numel, bool is_aligned,
                               int32_t least, int shift) {
  GroupMasks masks{0, 0};
#pragma unroll
  for (int k = 0; k < kGroupQuads; ++k) {
    const Quad quad = quad_at(p, first + k * kQuadValues, numel, is_aligned);
#pragma unroll
    for (int i = 0; i < kQuadValues; ++i) {
      const uint32_t bit = 1u << (k * kQuadValues + i);
      const int32_t rank = topk::rank_of(quad.values[i]) >> shift;
      masks.above |= rank > least ? bit : 0;
      masks.equal |= rank == least ? bit : 0;
    }
  }
  const int64_t count = numel - first;
  const uint32_t own = count < kGroupValues ? (1u << count) - 1 : ~0u;
  return {masks.above & own, masks.equal & own};
}

// Counts the ranks of a warp's lanes by their lower bits. Many values may be equal, so those with
// the first lane's rank are counted together. Lower bits that are all 0 are not counted.
__device__ void count_low(int32_t rank, bool is_counted, const Selection& selection) {
  const uint32_t lanes = __ballot_sync(kWholeWarp, is_counted);
  if (lanes == 0) {
    return;
  }
  const int lane = lane_of_warp();
  const int first = __ffs(static_cast<int>(lanes)) - 1;
  const bool is_same = rank == __shfl_sync(kWholeWarp, rank, first);
  const uint32_t same = __ballot_sync(kWholeWarp, is_counted && is_same);
  if (is_counted && (!is_same || lane == first)) {
    const int32_t count = is_same ? __popc(same) : 1;
    const int32_t low = rank & kLowMask;
    atomicAdd(selection.middle + (low >> kFineBits), count);
    atomicAdd(selection.low + low, count);
  }
}

// The second pass; each warp takes `tiles` tiles.
__global__ void __launch_bounds__(kThreads)
    count_low_kernel(const float* p, int64_t numel, int64_t tiles, Selection selection) {
  const RankState upper = *selection.upper;
  const int lane = lane_of_warp();
  const int64_t warp = int64_t{blockIdx.x} * kWarpsPerBlock + warp_of_block();
  const int64_t end = min(numel, (warp + 1) * tiles * kTileValues);
  const bool is_aligned = is_aligned_for_quads(p);
  for (int64_t begin = warp * tiles * kTileValues; begin < end; begin += kTileValues) {
    const int64_t first = begin + lane * kGroupValues;
    const bool is_needed =
        first < numel && reaches(selection.groups[first / kGroupValues], upper.prefix << kLowBits);
    if (!__any_sync(kWholeWarp, is_needed)) {
      continue;
    }
    uint32_t left = 0;
    if (is_needed) {
      left = masks_of(p, first, numel, is_aligned, upper.prefix, kLowBits).equal;
    }
    while (__any_sync(kWholeWarp, left != 0)) {
      const float value = left != 0 ? p[first + __ffs(static_cast<int>(left)) - 1] : 0.0f;
      const int32_t rank = topk::rank_of(value);
      count_low(rank, left != 0 && (rank & kLowMask) != 0, selection);
      left &= left - 1;
    }
  }
  if (is_last_block(selection.finished + 1)) {
    const auto middle = find_bin<kMiddleBins>(selection.middle, upper.wanted);
    const auto fine = find_bin<kFineBins>(selection.low + middle.prefix * kFineBins, middle.wanted);
    if (threadIdx.x == 0) {
      *selection.least = {upper.prefix << kLowBits | middle.prefix << kFineBits | fine.prefix,
                          fine.wanted};
    }
  }
}

// The third pass: each block writes the entries of one part. Each lane has a group. error,
// narrow_error: null for none.
__global__ void __launch_bounds__(kThreads)
    write_entries_kernel(const float* p, int64_t numel, Selection selection, float* error,
                         uint16_t* narrow_error, int32_t* indices, float* values) {
  const int lane = lane_of_warp();
  const int warp = warp_of_block();
  const int64_t part = take_part(selection.taken);
  const RankState least = *selection.least;
  const int64_t first = part * kPartValues + (warp * kWarpSize + lane) * int64_t{kGroupValues};
  const bool is_needed =
      first < numel && reaches(selection.groups[first / kGroupValues], least.prefix);
  GroupMasks masks{0, 0};
  if (is_needed) {
    masks = masks_of(p, first, numel, is_aligned_for_quads(p), least.prefix, 0);
  }
  const uint32_t own =
      static_cast<uint32_t>(__popc(masks.above)) << 16 | static_cast<uint32_t>(__popc(masks.equal));
  const uint32_t up_to = sum_up_to(own);
  __shared__ uint32_t of_warp[kWarpsPerBlock];
  __shared__ RankCounts of_parts;
  if (lane == kWarpSize - 1) {
    of_warp[warp] = up_to;
  }
  __syncthreads();
  uint32_t before = up_to - own;
  uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < kWarpsPerBlock; ++w) {
    before += w < warp ? of_warp[w] : 0;
    all += of_warp[w];
  }
  if (warp == 0) {
    const auto counts =
        counts_before(selection.parts, part,
                      {static_cast<int32_t>(all >> 16), static_cast<int32_t>(all & 0xffff)});
    if (lane == 0) {
      of_parts = counts;
    }
  }
  __syncthreads();
  const auto message = part_of_message(of_parts, least.wanted);
  RankCounts passed{static_cast<int32_t>(before >> 16), static_cast<int32_t>(before & 0xffff)};
  // A value that is not finite has the least rank or one above it.
  for (uint32_t left = masks.above | masks.equal; left != 0; left &= left - 1) {
    const int i = __ffs(static_cast<int>(left)) - 1;
    const float value = p[first + i];
    const int32_t rank = topk::rank_of(value);
    const int32_t entry = entry_of(rank, least.prefix, passed, message);
    if (entry >= 0) {
      indices[entry] = static_cast<int32_t>(first + i);
      values[entry] = topk::sent(value);
      if (narrow_error != nullptr) {
        narrow_error[first + i] = 0;
      }
    }
    if (error != nullptr && (entry >= 0 || rank >= static_cast<int32_t>(kInfinity))) {
      error[first + i] = 0.0f;
    }
    passed.above += rank > least.prefix ? 1 : 0;
    passed.equal += rank == least.prefix ? 1 : 0;
  }
}

// Adds a message's values to `flat`, the sum of the messages before it. `is_only`: whether this is
// the only message.
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

// The memory of a selection.
class SelectionMemory {
 public:
  SelectionMemory(int64_t numel, const at::TensorOptions& options) {
    const int64_t parts = (numel + kPartValues - 1) / kPartValues;
    const int64_t counts = kHighBins + kMiddleBins + kLowBins + 8;
    static_assert((kHighBins + kMiddleBins + kLowBins) % 2 == 0);
    zeros_ = at::zeros({parts + counts / 2}, options.dtype(at::kLong));
    groups_ = at::empty({tiles_of(numel) * kTileGroups}, options.dtype(at::kShort));
    auto* const states = reinterpret_cast<uint64_t*>(zeros_.mutable_data_ptr<int64_t>());
    auto* const high = reinterpret_cast<int32_t*>(states + parts);
    auto* const middle = high + kHighBins;
    auto* const low = middle + kMiddleBins;
    auto* const others = low + kLowBins;
    selection_ = {high,
                  middle,
                  low,
                  others,
                  others + 2,
                  reinterpret_cast<RankState*>(others + 4),
                  reinterpret_cast<RankState*>(others + 6),
                  states,
                  reinterpret_cast<uint16_t*>(groups_.mutable_data_ptr<int16_t>())};
  }

  const Selection& selection() const { return selection_; }

 private:
  at::Tensor zeros_;
  at::Tensor groups_;
  Selection selection_{};
};

void encode(at::TensorList tensors, const at::Tensor& message, double scale,
            const std::optional<at::Tensor>& error, const std::optional<at::Tensor>& rounding) {
  const int64_t numel = topk::check_encode(tensors, message, error, rounding);
  const int64_t count = message.numel() / topk::kBytesOfEntry;
  if (count == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(message.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const CompensatedMemory memory("topk_encode", numel, scale, error, rounding, message.options());
  const SelectionMemory found(numel, message.options());
  const auto& work = memory.work();
  launch_compensated(
      "topk_encode", tensors, memory, [&](const auto& table, auto kind, int64_t first) {
        constexpr int kCapacity = std::decay_t<decltype(table)>::kCapacity;
        constexpr ErrorKind kKind = kind;
        const auto grid =
            warp_grid_of(compensate_count_kernel<kCapacity, kKind>, tiles_of(table.total));
        compensate_count_kernel<kCapacity, kKind><<<grid.blocks, kThreads, 0, stream>>>(
            table, {work, first, grid.each}, found.selection(), static_cast<int32_t>(count));
      });
  const auto grid = warp_grid_of(count_low_kernel, tiles_of(numel));
  count_low_kernel<<<grid.blocks, kThreads, 0, stream>>>(work.p, numel, grid.each,
                                                         found.selection());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  auto* const indices = reinterpret_cast<int32_t*>(message.mutable_data_ptr<uint8_t>());
  write_entries_kernel<<<blocks_for(numel, kPartValues), kThreads, 0, stream>>>(
      work.p, numel, found.selection(), memory.error(), work.narrow_error, indices,
      reinterpret_cast<float*>(indices + count));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
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
  give_flat(op, flat, tensors, static_cast<float>(scale));
}

// Skips entries with an index beyond the values: to report them, the host would have to wait for
// the device.

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
