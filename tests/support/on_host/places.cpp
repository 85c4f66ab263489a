#include "places.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <sstream>

namespace on_host {
namespace {

std::string output_of(const std::string& command) {
  std::string all;
  if (FILE* const pipe = popen(command.c_str(), "r"); pipe != nullptr) {
    char part[4096];
    for (size_t count; (count = fread(part, 1, sizeof part, pipe)) > 0;) {
      all.append(part, count);
    }
    pclose(pipe);
  }
  return all;
}

// Shortens "/folder/of/the/build/cuda/row.h:12 (discriminator 3)" to "cuda/row.h:12".
std::string short_line(const std::string& line) {
  const auto begin =
      line.find("/cuda/") == std::string::npos ? line.rfind('/') : line.rfind("/cuda/");
  const auto from = begin == std::string::npos ? 0 : begin + 1;
  return line.substr(from, line.find(' ', from) - from);
}

}  // namespace

std::vector<std::string> lines_of(const std::vector<const void*>& instructions) {
  std::vector<std::string> lines;
  std::ostringstream command;
  for (const void* const instruction : instructions) {
    Dl_info info{};
    dladdr(instruction, &info);
    // One byte before the return address, inside the call instruction.
    const auto offset =
        static_cast<const char*>(instruction) - static_cast<const char*>(info.dli_fbase) - 1;
    if (lines.empty()) {
      command << "addr2line --addresses --inlines --exe '" << info.dli_fname << "'";
    }
    std::ostringstream hex;
    hex << "0x" << std::hex << offset;
    command << ' ' << hex.str();
    lines.push_back("library.so+" + hex.str());
  }
  if (lines.empty()) {
    return lines;
  }
  command << " 2>/dev/null";
  std::istringstream told(output_of(command.str()));
  std::string line;
  size_t next = 0;
  bool is_first = false;
  while (std::getline(told, line)) {
    if (line.rfind("0x", 0) == 0) {
      is_first = true;
      ++next;
    } else if (next > 0 && next <= lines.size() && line.find("??") == std::string::npos) {
      auto& own = lines[next - 1];
      const auto place = short_line(line);
      if (is_first) {
        own = place;
      } else if (place.rfind("cuda/", 0) == 0) {  // leaves out the host's call of the kernel
        own += " < " + place;
      }
      is_first = false;
    }
  }
  return lines;
}

}  // namespace on_host
