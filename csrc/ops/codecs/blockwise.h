// Block quantisation: shared by the operators' kernels.
#pragma once

#include "ops/codecs/block_operators.h"

namespace commhook::blockwise {

// How to quantise values; see blockwise_math.h.
struct Format {
  int64_t bits;
  int64_t block_size;
  bool is_symmetric;

  // Whether a block's step comes from Fit in blockwise_math.h.
  bool is_fitted(bool is_random) const { return bits == 2 && is_symmetric && !is_random; }
  codecs::BlockForm form() const { return {block_size, bits, is_symmetric ? 1 : 2}; }
};

struct Codec {
  static constexpr const char* kName = "blockwise";
  static constexpr const char* kSettings = "int bits, int block_size, bool symmetric";
  using Settings = codecs::Types<int64_t, int64_t, bool>;
  static constexpr bool kRounds = true;

  C10_EXPORT static Format check(const char* op, int64_t bits, int64_t block_size,
                                 bool is_symmetric);
  static codecs::BlockForm form(const Format& format) { return format.form(); }
};

}  // namespace commhook::blockwise
