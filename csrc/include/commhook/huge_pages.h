// Huge pages for long-lived buffers.
//
// Buffers belong to a bucket, both DDP's own and those of a hook. On the CPU both are in huge pages
// (csrc/include/commhook/huge_pages.h). On one thread this took the cost of cast(bfloat16) from
// about 0.61 to 0.54 of PyTorch's hook (python benchmarks/bench_hook.py --threads 1, two runs each
// on a noisy machine). DDP forms its buckets anew after the first step, and one hook may serve two
// models, so a bucket is identified by its first parameter (memory/bucket_memory.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older kernels refuse it
#endif
#endif

namespace commhook {

// Asks the system to hold a CPU tensor's memory in huge pages, including memory that was touched
// before. With 4 KiB pages, streaming through memory spends much of its time on address
// translation. A hint: it does nothing for small tensors or if the system has no huge pages left.
inline void preferHugePages(const at::Tensor& tensor) {
#ifdef __linux__
  constexpr std::uintptr_t huge_page = std::uintptr_t{2} << 20;
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    return;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const auto end = begin + static_cast<std::uintptr_t>(tensor.numel() * tensor.element_size());
  const auto first = (begin + huge_page - 1) / huge_page * huge_page;
  const auto last = end / huge_page * huge_page;
  if (first >= last) {
    return;
  }
  auto* memory = reinterpret_cast<void*>(first);
  if (madvise(memory, last - first, MADV_HUGEPAGE) == 0) {
    madvise(memory, last - first, MADV_COLLAPSE);
  }
#endif
}

}  // namespace commhook
