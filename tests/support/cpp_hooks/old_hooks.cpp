// Imitates a library that was built for another torch.
#include <cstdint>

struct Library {
  uint32_t headers_version;
  const char* torch_version;
  void* registry;
};

extern "C" __attribute__((visibility("default"))) const Library* commhook_hook_library() {
  static const Library library{1, "1.0.0", nullptr};
  return &library;
}
