// The versions and features that the library was compiled for.
#include <torch/library.h>

#include <string>

// Python searches the file for this text before it loads the library, since a library for another
// torch may fail to load. The attribute keeps the text although no code reads it.
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
