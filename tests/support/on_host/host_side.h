// What tests ask of the host that plays the kernels.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "on_host.h"
#include "requests.h"

namespace on_host {

struct Barriers {
  // The one that is left out, by its name; empty for none. No kernel runs when it changes.
  std::string omitted;
  std::set<std::pair<const char*, int>> reached;  // since they were last taken
};

// A barrier's file, with its folder, and line: "cuda/topk.cu:48".
std::string name_of(const Place& barrier);

// From here on the device has room for so many warps at once.
void set_warps(int64_t warps);
// The names of the kernels that were launched since the last call.
std::vector<std::string> take_launched();

// From here on this barrier orders nothing.
void omit_barrier(const std::string& name);
std::vector<std::string> take_barriers();

void watch_requests(bool is_watched);
std::vector<requests::Cost> take_requests();

}  // namespace on_host
