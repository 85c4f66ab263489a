// What the library was compiled for.
#include <torch/library.h>

#include <string>

// Python looks for this text in the file before it loads it, since a library of another torch may
// not load at all. Kept whole, though nothing here reads it.
extern "C" __attribute__((used, visibility("default"))) const char commhook_built_for_torch[] =
    "commhook built for torch " COMMHOOK_TORCH_VERSION;

namespace commhook {
namespace {

constexpr char kVersion[] = COMMHOOK_TORCH_VERSION;

std::string built_for_torch() { return kVersion; }

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
