// The names of dtypes and layouts in errors, as Python prints them.
#pragma once

#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <cctype>
#include <string>

namespace commhook {

// For example "torch.float32". Operators receive a dtype as a number, which may be no dtype.
inline std::string dtype_name(c10::ScalarType dtype) {
  const auto number = static_cast<int>(dtype);
  if (number < 0 || number >= static_cast<int>(c10::ScalarType::Undefined)) {
    return "dtype number " + std::to_string(number);
  }
  return "torch." + std::string(c10::getDtypeNames(dtype).first);
}

// For example "torch.sparse_csr" for kSparseCsr.
inline std::string layout_name(c10::Layout layout) {
  std::string name;
  for (const char letter : c10::str(layout)) {
    if (std::isupper(static_cast<unsigned char>(letter)) != 0 && !name.empty()) {
      name += '_';
    }
    name += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return "torch." + (name == "sparse" ? "sparse_coo" : name);
}

}  // namespace commhook
