// How errors name a dtype.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace commhook {

// "torch.float32".
inline std::string dtype_name(c10::ScalarType dtype) {
  return "torch." + std::string(c10::getDtypeNames(dtype).first);
}

}  // namespace commhook
