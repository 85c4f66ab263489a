// Kernels with mistakes that the host must report.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <string>

#include "on_host.h"

namespace on_host {
namespace {

constexpr unsigned kCount = 64;  // threads, two warps

int32_t* shared() { return static_cast<int32_t*>(dynamic_memory()); }

// Each thread writes a word of shared memory and reads its neighbour's.
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
    give_to_next(out, [] { __syncthreads(); });
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

struct alignas(16) Vector {
  int32_t words[4];
};

// Two blocks of two warps each. Without a race, `data` does not depend on the order of threads.
void run_racing(const std::string& name, int32_t* data) {
  const unsigned i = threadIdx.x;
  const unsigned all = blockIdx.x * kCount + i;
  auto* const bytes = reinterpret_cast<uint8_t*>(data);
  auto* const vectors = reinterpret_cast<Vector*>(data);
  // One block hands data to the other, in the order in which they happen to run.
  const auto hand_over = [&](const auto& release, const auto& acquire, bool all_release = false) {
    static int32_t is_last;
    begin_static(&is_last, sizeof is_last);
    data[1 + all] = 1;
    if (all_release) {
      __threadfence();
    }
    __syncthreads();
    if (i == 0) {
      release();
      is_last = atomicAdd(data, 1);
      acquire();
    }
    __syncthreads();
    if (is_last == 1) {
      data[500 + i] = data[1 + i] + data[1 + kCount + i];
    }
  };
  // The thread that runs first gives its element to a thread of another block.
  const auto signal = [&](int release, int acquire) {
    if (i != 0) {
      return;
    }
    int32_t* const flag = data + 1000;
    if (__atomic_load_n(flag, acquire) == 0) {
      data[500] = 1;
      __atomic_store_n(flag, 1, release);
    } else {
      data[501] = data[500];
    }
  };
  if (name == "none") {
    data[all] = 1;
  } else if (name == "all write one element") {
    data[0] = 1;
  } else if (name == "two blocks write one element") {
    data[i] = 1;
  } else if (name == "a block reads what another writes") {
    data[500 + all] = data[i];
    data[all] = 1;
  } else if (name == "all read one element, one writes it") {
    data[1 + all] = data[0];
    if (all == 77) {
      data[0] = 1;
    }
  } else if (name == "neighbouring bytes") {
    bytes[all] = 1;
  } else if (name == "bytes that overlap") {
    bytes[all] = 1;
    bytes[all + 1] = 1;
  } else if (name == "neighbouring vectors") {
    vectors[all] = {{1, 2, 3, 4}};
  } else if (name == "a word of a neighbour's vector") {
    vectors[all] = {{1, 2, 3, 4}};
    data[4 * all + 5] = 2;
  } else if (name == "atomics") {
    atomicAdd(data, 1);
    atomicMax(data, 1);
  } else if (name == "an atomic and a read") {
    atomicAdd(data, 1);
    data[1 + all] = data[0];
  } else if (name == "an atomic and a write") {
    atomicExch(data, 1);
    data[0] = 1;
  } else if (name == "volatile as a flag for nothing") {
    *static_cast<volatile int32_t*>(data) = 1;
  } else if (name == "a read, then a write past a barrier of other lanes") {
    shared()[i] = 0;
    __syncwarp();
    data[all] = shared()[i ^ 1];
    __syncwarp(i % 32 < 16 ? 0xffffu : 0xffff0000u);
    shared()[i ^ 16] = 1;
  } else if (name == "a barrier of the lanes that share") {
    shared()[i] = 0;
    __syncwarp(i % 32 < 16 ? 0xffffu : 0xffff0000u);
    data[all] = shared()[i ^ 8];
  } else if (name == "shared memory of two blocks") {
    shared()[i] = 1;
  } else if (name == "fences") {
    hand_over(__threadfence, __threadfence);
  } else if (name == "a store with release, a load with acquire") {
    signal(__ATOMIC_RELEASE, __ATOMIC_ACQUIRE);
  } else if (name == "a store without release") {
    signal(__ATOMIC_RELAXED, __ATOMIC_ACQUIRE);
  } else if (name == "a load without acquire") {
    signal(__ATOMIC_RELEASE, __ATOMIC_RELAXED);
  } else if (name == "fences of all before the barrier") {
    hand_over([] {}, __threadfence, true);
  } else if (name == "no fence before the atomic") {
    hand_over([] {}, __threadfence);
  } else if (name == "no fence after the atomic") {
    hand_over(__threadfence, [] {});
  }
}

void racing(const std::string& name) {
  constexpr int64_t kWords = 1024;
  auto data = at::zeros({kWords}, at::kInt);
  launch(
      "racing", 2, kCount, kCount * sizeof(int32_t), 0,
      [&](int32_t* words) { run_racing(name, words); }, data.mutable_data_ptr<int32_t>());
}

// Accesses of one warp with a known cost.
void run_watched(const std::string& name, const Vector* from, Vector* to) {
  const unsigned i = threadIdx.x;
  const auto* const words = reinterpret_cast<const int32_t*>(from);
  auto* const out = reinterpret_cast<int32_t*>(to);
  auto* const vectors = static_cast<Vector*>(dynamic_memory());
  if (name == "words") {
    out[i] = words[i];
  } else if (name == "words past the start of a sector") {
    out[i + 1] = words[i + 1];
  } else if (name == "every second word") {
    out[2 * i] = words[2 * i];
  } else if (name == "one word for all") {
    out[i] = words[0];
  } else if (name == "vectors") {
    to[i] = from[i];
  } else if (name == "every second vector") {
    to[2 * i] = from[2 * i];
  } else if (name == "bytes") {
    reinterpret_cast<uint8_t*>(to)[i] = reinterpret_cast<const uint8_t*>(from)[i];
  } else if (name == "shared words") {
    shared()[i] = 1;
  } else if (name == "every second shared word") {
    shared()[2 * i] = 1;
  } else if (name == "one bank") {
    shared()[32 * i] = 1;
  } else if (name == "one bank, padded") {
    shared()[33 * i] = 1;
  } else if (name == "shared vectors") {
    vectors[i] = {{1, 2, 3, 4}};
  } else if (name == "every second shared vector") {
    vectors[2 * i] = {{1, 2, 3, 4}};
  } else if (name == "a loop of other lengths") {
    // Lanes with more steps leave the others behind; in the next loop all run together again.
    for (int repeated = 0; repeated < 3; ++repeated) {
      for (unsigned k = 0; k < i / 8; ++k) {
        out[32 * k + i] = 1;
      }
    }
  } else if (name == "a branch in a loop") {
    for (unsigned k = 0; k < 4; ++k) {
      if ((i + k) % 2 == 0) {
        out[i] = 1;
      }
      shared()[i] = 1;
    }
  }
}

void watched(const std::string& name) {
  constexpr int64_t kWords = 1024;
  const auto from = at::zeros({kWords}, at::kInt);
  auto to = at::zeros({kWords}, at::kInt);
  const std::string own = name;  // on this stack, like the kernel's arguments
  launch(
      "watched", 1, 32, 33 * 32 * sizeof(int32_t), 0,
      [&](const void* read, void* written) {
        run_watched(own, static_cast<const Vector*>(read), static_cast<Vector*>(written));
      },
      from.const_data_ptr(), to.mutable_data_ptr());
}

// Returns the values that the threads have written.
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
  m.def("racing(str name) -> ()", racing);
  m.def("watched(str name) -> ()", watched);
  m.def("launch_empty(int blocks, int threads, int shared_bytes) -> ()", launch_empty);
}

}  // namespace on_host
