#include "runtime/huge_pages.h"

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older kernels refuse it
#endif
#endif

namespace commhook {

void prefer_huge_pages(const at::Tensor& tensor) {
#ifdef __linux__
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    return;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const auto end = begin + static_cast<std::uintptr_t>(tensor.numel() * tensor.element_size());
  const auto first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const auto last = end / kHugePage * kHugePage;
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
