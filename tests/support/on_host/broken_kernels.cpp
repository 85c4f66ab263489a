// Kernels with the mistakes that the host must show.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <string>

#include "on_host.h"

namespace on_host {
namespace {

constexpr unsigned kCount = 64;  // threads, two warps

int32_t* shared() { return static_cast<int32_t*>(dynamic_memory()); }

// Each writes a word of shared memory and reads its neighbour's.
template <typename Barrier>
void give_to_next(int32_t* out, const Barrier& barrier) {
  const unsigned i = threadIdx.x;
  shared()[i] = static_cast<int32_t>(i);
  barrier();
  out[i] = shared()[(i + 1) % kCount];
}

void run_broken(const std::string& name, int32_t* out) {
  const unsigned i = threadIdx.x;
  if (name == "none") {
    give_to_next(out, __syncthreads);
  } else if (name == "no barrier") {
    give_to_next(out, [] {});
  } else if (name == "a barrier of the warp alone") {
    give_to_next(out, [] { __syncwarp(); });
  } else if (name == "a shuffle as a barrier") {
    give_to_next(out, [] { __shfl_sync(~0u, 0, lane()); });
  } else if (name == "memory that nobody wrote") {
    out[i] = shared()[i];
  } else if (name == "half of a block at a barrier") {
    if (i < kCount / 2) {
      __syncthreads();
    }
  } else if (name == "half of a warp at a barrier") {
    if (i % 2 == 0) {
      __syncwarp();
    }
  } else if (name == "half of a warp in a shuffle") {
    if (i % 2 == 0) {
      out[i] = __shfl_xor_sync(~0u, 1, 1);
    }
  } else if (name == "half of a warp in a shuffle, for itself") {
    if (i % 2 == 0) {
      out[i] = __shfl_xor_sync(~0u, 1, 2);
    }
  } else if (name == "a shuffle of half of a warp") {
    out[i] = __shfl_sync(0xffffu, 1, 0);
  } else if (name == "a block that waits for another") {
    __nanosleep(1);
  }
}

// What the threads have written.
at::Tensor broken(const std::string& name) {
  auto out = at::empty({kCount}, at::kInt);
  auto* const data = out.mutable_data_ptr<int32_t>();
  launch("broken", 1, kCount, kCount * sizeof(int32_t), 0, [&] { run_broken(name, data); });
  return out;
}

void launch_empty(int64_t blocks, int64_t threads, int64_t shared_bytes) {
  launch("empty", static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
         static_cast<size_t>(shared_bytes), 0, [] {});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(commhook_on_host, m) {
  m.def("broken(str name) -> Tensor", broken);
  m.def("launch_empty(int blocks, int threads, int shared_bytes) -> ()", launch_empty);
}

}  // namespace on_host
