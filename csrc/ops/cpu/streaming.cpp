#include "ops/cpu/streaming.h"

#include <fstream>

namespace commhook::cpu {
namespace {

// The last-level cache that one processor can use. (sysconf returns the sum over all processors.)
int64_t cache_bytes() {
  static const int64_t bytes = [] {
    int64_t kibibytes = 0;
    std::ifstream("/sys/devices/system/cpu/cpu0/cache/index3/size") >> kibibytes;
    return kibibytes > 0 ? kibibytes << 10 : int64_t{32} << 20;
  }();
  return bytes;
}

}  // namespace

int64_t streaming_bytes() { return cache_bytes() / 4; }

bool copies_past_caches(int64_t read_bytes, int64_t written_bytes) {
  return written_bytes >= streaming_bytes() && read_bytes + written_bytes >= cache_bytes();
}

int64_t bytes_of(at::TensorList tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    bytes += tensor.numel() * tensor.element_size();
  }
  return bytes;
}

}  // namespace commhook::cpu
