// 8-bit floats with a scale for each block: shared by the operators' kernels.
#pragma once

#include <string_view>

#include "ops/codecs/block_operators.h"

namespace commhook::fp8 {

struct Format {
  bool is_e5m2;
  codecs::BlockForm form;
};

struct Codec {
  static constexpr const char* kName = "fp8";
  static constexpr const char* kSettings = "str format, int block_size";
  using Settings = codecs::Types<std::string_view, int64_t>;
  static constexpr bool kRounds = false;

  C10_EXPORT static Format check(const char* op, std::string_view format, int64_t block_size);
  static const codecs::BlockForm& form(const Format& format) { return format.form; }
};

}  // namespace commhook::fp8
