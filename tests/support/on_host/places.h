// Finds the places of the library's instructions in the sources.
#pragma once

#include <string>
#include <vector>

namespace on_host {

// For each return address: the file and line, then the lines into which it is inlined, as
// "cuda/row.h:12 < cuda/flatten.cu:20". Without addr2line, the offset in the library.
std::vector<std::string> lines_of(const std::vector<const void*>& instructions);

}  // namespace on_host
