// What the library was compiled for.
#include <torch/library.h>

#include <string>

namespace commhook {
namespace {

std::string built_for_torch() { return COMMHOOK_TORCH_VERSION; }

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
