// Values at random places, on CUDA. One pass over all values writes the error and searches for
// values that are not finite. A second pass goes over the entries of the message.
#include <torch/library.h>

#include "compensate.cuh"
#include "flat.cuh"
#include "ops/codecs/float_bits.h"
#include "ops/codecs/randomk.h"
#include "rounding.cuh"

namespace commhook::cuda {
namespace {

// Writes p, and notes whether a value is not finite; such a value becomes 0 in the error.
template <int kCapacity, ErrorKind kKind>
__global__ void __launch_bounds__(kThreads)
    compensate_finite_kernel(const __grid_constant__ TensorTable<const void, kCapacity> table,
                             CompensationPart part, int32_t* has_nonfinite) {
  __shared__ Quad tiles[kBlockTileQuads];
  bool is_finite = true;
  for_each_compensated_tile<kKind, false>(table, part, tiles, [&](int64_t, const TileQuads& p) {
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
#pragma unroll
      for (int i = 0; i < kQuadValues; ++i) {
        is_finite = is_finite && (bits_of(p.quads[k].values[i]) & kAbsolute) < kInfinity;
      }
    }
  });
  if (!is_finite) {
    atomicExch(has_nonfinite, 1);  // a plain store would race with those of other threads
  }
}

// The random numbers that give the indices; computed once for all threads of a block.
__device__ randomk::Draw drawn(const int64_t* rounding, int64_t numel) {
  __shared__ randomk::Draw draw;
  if (threadIdx.x == 0) {
    const auto seed = seed_of(rounding);
    draw = randomk::draw_from(numel, seed.low, seed.high, seed.step);
  }
  __syncthreads();
  return draw;
}

__global__ void __launch_bounds__(kThreads)
    take_entries_kernel(const float* p, int64_t numel, const int64_t* rounding,
                        const int32_t* has_nonfinite, float* error, uint16_t* narrow_error,
                        float* values, int64_t count) {
  const auto draw = drawn(rounding, numel);
  const int64_t entry = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (entry >= count) {
    return;
  }
  if (*has_nonfinite != 0) {
    values[entry] = float_of(kNaN);
    return;
  }
  const auto index = randomk::index_of(draw, static_cast<uint32_t>(entry));
  values[entry] = p[index];
  if (error != nullptr) {
    error[index] = 0.0f;
  }
  if (narrow_error != nullptr) {
    narrow_error[index] = 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    put_entries_kernel(const float* values, int64_t count, const int64_t* rounding, float* flat,
                       int64_t numel) {
  const auto draw = drawn(rounding, numel);
  const int64_t entry = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (entry < count) {
    flat[randomk::index_of(draw, static_cast<uint32_t>(entry))] = values[entry];
  }
}

void encode(at::TensorList tensors, const at::Tensor& message, const at::Tensor& rounding,
            bool unbiased, double scale, const std::optional<at::Tensor>& error) {
  const int64_t numel = randomk::check_encode(tensors, message, rounding, unbiased, error, scale);
  const int64_t count = message.numel() / randomk::kBytesOfEntry;
  if (count == 0) {
    return;
  }
  const c10::cuda::CUDAGuard guard(message.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const CompensatedMemory memory("randomk_encode", numel, scale, error, rounding,
                                 message.options());
  const auto has_nonfinite = at::zeros({1}, message.options().dtype(at::kInt));
  const auto& work = memory.work();
  launch_compensated(
      "randomk_encode", tensors, memory, [&](const auto& table, auto kind, int64_t first) {
        constexpr int kCapacity = std::decay_t<decltype(table)>::kCapacity;
        constexpr ErrorKind kKind = kind;
        const auto grid =
            warp_grid_of(compensate_finite_kernel<kCapacity, kKind>, tiles_of(table.total));
        compensate_finite_kernel<kCapacity, kKind><<<grid.blocks, kThreads, 0, stream>>>(
            table, {work, first, grid.each}, has_nonfinite.mutable_data_ptr<int32_t>());
      });
  take_entries_kernel<<<blocks_for(count, kThreads), kThreads, 0, stream>>>(
      work.p, numel, work.rounding, has_nonfinite.const_data_ptr<int32_t>(), memory.error(),
      work.narrow_error, reinterpret_cast<float*>(message.mutable_data_ptr<uint8_t>()), count);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void decode(const at::Tensor& message, at::TensorList tensors, const at::Tensor& rounding) {
  const int64_t numel = randomk::check_decode(message, tensors, rounding);
  const int64_t count = message.numel() / randomk::kBytesOfEntry;
  const c10::cuda::CUDAGuard guard(message.device());
  const auto* const seed = numbers_of("randomk_decode", "rounding", rounding);
  const auto flat = at::zeros({numel}, message.options().dtype(at::kFloat));
  if (count > 0) {
    put_entries_kernel<<<blocks_for(count, kThreads), kThreads, 0,
                         c10::cuda::getCurrentCUDAStream()>>>(
        reinterpret_cast<const float*>(message.const_data_ptr<uint8_t>()), count, seed,
        flat.mutable_data_ptr<float>(), numel);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  give_flat("randomk_decode", flat, tensors);
}

TORCH_LIBRARY_IMPL(commhook, CUDA, m) {
  m.impl("randomk_encode", encode);
  m.impl("randomk_decode", decode);
}

}  // namespace
}  // namespace commhook::cuda
