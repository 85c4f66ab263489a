// The host's interface for tests that run kernels on it.
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
  // The name of the omitted barrier; empty for none. No kernel runs when it changes.
  std::string omitted;
  std::set<std::pair<const char*, int>> reached;  // since they were last taken
};

// A barrier's file, with its folder, and line: "cuda/topk.cu:48".
std::string name_of(const Place& barrier);

// Sets the number of warps that fit on the device at once.
void set_warps(int64_t warps);
// The names of the kernels that were launched since the last call.
std::vector<std::string> take_launched();

// Makes this barrier order nothing from now on.
void omit_barrier(const std::string& name);
std::vector<std::string> take_barriers();

void watch_requests(bool is_watched);
std::vector<requests::Cost> take_requests();

}  // namespace on_host
