// 8-bit floats with a scale for each block: shared by the operators' kernels.
#pragma once

#include <string_view>

#include "ops/codecs/block_codec.h"

namespace commhook::fp8 {

struct Format {
  bool is_e5m2;
  codecs::BlockForm form;
};

// Throws an error that names the operator `op`.
C10_EXPORT Format check_format(const char* op, std::string_view format, int64_t block_size);

}  // namespace commhook::fp8
