// Which destinations are written past the caches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace commhook::cpu {

// A destination from this size on is written past the caches. By the time that it is read again the
// rest of a step has gone through them. Where exactly makes less difference to the backward of
// benchmarks/bench_hook.py than its noise; for the 51 to 102 MB of ResNet-50 in
// benchmarks/bench_bucket.py it is faster by a quarter and more.
int64_t streaming_bytes();

// Of all elements together.
int64_t bytes_of(at::TensorList tensors);

}  // namespace commhook::cpu
