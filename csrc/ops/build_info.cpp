// What the library was compiled for.
#include <torch/library.h>

#include <string>

namespace commhook {
namespace {

// Python looks for this mark in the file before it loads it, since a library of another torch may
// not load at all.
constexpr char kMark[] = "commhook built for torch " COMMHOOK_TORCH_VERSION;

std::string built_for_torch() { return std::string(kMark).substr(sizeof("commhook built for torch")); }

bool has_cuda_kernels() {
#ifdef COMMHOOK_WITH_CUDA
  return true;
#else
  return false;
#endif
}

TORCH_LIBRARY_IMPL(commhook, CompositeImplicitAutograd, m) {
  m.impl("built_for_torch", built_for_torch);
  m.impl("has_cuda_kernels", has_cuda_kernels);
}

}  // namespace
}  // namespace commhook
