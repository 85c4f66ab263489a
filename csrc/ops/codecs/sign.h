// Signs of values: shared by the operators' kernels.
#pragma once

#include "ops/codecs/block_operators.h"

namespace commhook::sign {

struct Codec {
  static constexpr const char* kName = "sign";
  static constexpr const char* kSettings = "int block_size";
  using Settings = codecs::Types<int64_t>;
  static constexpr bool kRounds = false;

  C10_EXPORT static codecs::BlockForm check(const char* op, int64_t block_size);
  static const codecs::BlockForm& form(const codecs::BlockForm& format) { return format; }
};

}  // namespace commhook::sign
