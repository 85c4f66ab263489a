// Block quantisation: shared by the operators' kernels.
#pragma once

#include "ops/codecs/block_codec.h"

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

// Throws an error that names the operator `op`.
C10_EXPORT Format check_format(const char* op, int64_t bits, int64_t block_size, bool is_symmetric);

}  // namespace commhook::blockwise
