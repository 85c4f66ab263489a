// How errors name a dtype.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace commhook {

// "torch.float32". Operators take a dtype as a number, which may be none.
inline std::string dtype_name(c10::ScalarType dtype) {
  const auto number = static_cast<int>(dtype);
  if (number < 0 || number >= static_cast<int>(c10::ScalarType::Undefined)) {
    return "dtype number " + std::to_string(number);
  }
  return "torch." + std::string(c10::getDtypeNames(dtype).first);
}

}  // namespace commhook
