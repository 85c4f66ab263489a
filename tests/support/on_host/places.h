// Where instructions of the library stand in the sources.
#pragma once

#include <string>
#include <vector>

namespace on_host {

// Of each, by its return address: the file and line, then those that it is inlined into, as
// "cuda/row.h:12 < cuda/flatten.cu:20"; the offset in the library without addr2line.
std::vector<std::string> lines_of(const std::vector<const void*>& instructions);

}  // namespace on_host
