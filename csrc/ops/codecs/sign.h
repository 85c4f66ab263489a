// Signs of values: shared by the operators' kernels.
#pragma once

#include "ops/codecs/block_codec.h"

namespace commhook::sign {

// Throws an error that names the operator `op`.
C10_EXPORT codecs::BlockForm check_form(const char* op, int64_t block_size);

}  // namespace commhook::sign
