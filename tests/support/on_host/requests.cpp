#include "requests.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace on_host::requests {
namespace {

constexpr unsigned kLanes = 32;
constexpr unsigned kSectorBytes = 32;
constexpr unsigned kBankBytes = 4;
constexpr unsigned kBanks = 32;

// A tree of the calls in which threads are; a node is a call from inside its parent.
struct Node {
  uint32_t parent;
  const void* call;
};
constexpr uint32_t kRoot = 0;

// An instruction, reached through certain calls.
struct Site {
  uint32_t node;
  const void* instruction;
};

struct Event {
  uint32_t site;
  uint8_t bytes;  // 0 if the thread accessed no memory
  Kind kind;
  uintptr_t address;
};

struct Thread {
  uint32_t node = kRoot;
  std::vector<Event> events;
};

struct Pair {
  size_t operator()(const std::pair<uint32_t, const void*>& key) const {
    return std::hash<const void*>()(key.second) * 31 + key.first;
  }
};
using Numbers = std::unordered_map<std::pair<uint32_t, const void*>, uint32_t, Pair>;

std::atomic<bool> watched = false;  // read by all threads of the host
// For a thread of the host, which has one launch at a time.
thread_local std::string kernel;
thread_local std::vector<Thread> threads;
thread_local std::vector<Node> nodes;
thread_local Numbers node_numbers;
thread_local std::vector<Site> sites;
thread_local Numbers site_numbers;
thread_local std::vector<uint32_t> ranks;  // of sites

std::mutex mutex;
std::map<std::tuple<std::string, Kind, const void*>, Cost> costs;

uint32_t site_of(const Thread& thread, const void* instruction) {
  const auto [found, is_new] =
      site_numbers.try_emplace({thread.node, instruction}, static_cast<uint32_t>(sites.size()));
  if (is_new) {
    sites.push_back({thread.node, instruction});
  }
  return found->second;
}

// The outermost call first, the instruction last.
std::vector<const void*> path_of(const Site& site) {
  std::vector<const void*> path{site.instruction};
  for (uint32_t node = site.node; node != kRoot; node = nodes[node].parent) {
    path.push_back(nodes[node].call);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

// Orders sites as they are in the library; called code counts at the place of its call.
void rank_sites() {
  if (ranks.size() == sites.size()) {
    return;
  }
  std::vector<std::pair<std::vector<const void*>, uint32_t>> paths;
  for (uint32_t i = 0; i < sites.size(); ++i) {
    paths.emplace_back(path_of(sites[i]), i);
  }
  std::sort(paths.begin(), paths.end());
  ranks.resize(sites.size());
  for (uint32_t rank = 0; rank < paths.size(); ++rank) {
    ranks[paths[rank].second] = rank;
  }
}

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

using Events = std::vector<const Event*>;

// The distinct units of `unit` bytes that events touch.
std::vector<uintptr_t> units_of(Events::const_iterator begin, Events::const_iterator end,
                                unsigned unit) {
  std::vector<uintptr_t> units;
  for (auto each = begin; each != end; ++each) {
    const auto& event = **each;
    for (uintptr_t own = event.address / unit; own <= (event.address + event.bytes - 1) / unit;
         ++own) {
      units.push_back(own);
    }
  }
  std::sort(units.begin(), units.end());
  units.erase(std::unique(units.begin(), units.end()), units.end());
  return units;
}

int64_t count_units(const Events& events, unsigned unit) {
  return static_cast<int64_t>(units_of(events.begin(), events.end(), unit).size());
}

// How many times the busiest bank must give a word.
int64_t passes_of(Events::const_iterator begin, Events::const_iterator end) {
  std::array<int64_t, kBanks> of_bank{};
  for (const uintptr_t word : units_of(begin, end, kBankBytes)) {
    ++of_bank[word % kBanks];
  }
  return *std::max_element(of_bank.begin(), of_bank.end());
}

// Counts one access for the lanes, in order, that execute it together.
void count(const Events& events, const std::vector<unsigned>& lanes) {
  const Event& first = *events.front();
  const Site& site = sites[first.site];
  auto& cost = costs[{kernel, first.kind, site.instruction}];
  cost.kernel = kernel;
  cost.kind = first.kind;
  cost.instruction = site.instruction;
  ++cost.requests;
  const int64_t bytes = count_units(events, 1);
  cost.bytes += bytes;
  if (first.kind <= Kind::kGlobalAtomic) {
    cost.parts += count_units(events, kSectorBytes);
    cost.fewest += up(bytes, kSectorBytes);
    return;
  }
  // The hardware executes accesses of 8 bytes for half a warp at a time, of 16 bytes for a quarter.
  const unsigned at_once = first.bytes > 8 ? kLanes / 4 : first.bytes > 4 ? kLanes / 2 : kLanes;
  for (size_t i = 0; i < events.size();) {
    size_t next = i;
    while (next < events.size() && lanes[next] / at_once == lanes[i] / at_once) {
      ++next;
    }
    cost.parts += passes_of(events.begin() + static_cast<int64_t>(i),
                            events.begin() + static_cast<int64_t>(next));
    i = next;
  }
  cost.fewest += up(count_units(events, kBankBytes), kBanks);
}

// Replays a warp: the lanes with the first place in the library go on, until the others have caught
// up. So the lanes of a loop wait at its end for lanes that have left it, and an iteration waits
// for the branches of all lanes.
void put_together(const Thread* warp) {
  std::array<size_t, kLanes> next{};
  Events events;
  std::vector<unsigned> lanes;
  for (;;) {
    uint32_t least = UINT32_MAX;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (next[lane] < warp[lane].events.size()) {
        least = std::min(least, ranks[warp[lane].events[next[lane]].site]);
      }
    }
    if (least == UINT32_MAX) {
      return;
    }
    events.clear();
    lanes.clear();
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (next[lane] < warp[lane].events.size()) {
        const Event& event = warp[lane].events[next[lane]];
        if (ranks[event.site] == least) {
          ++next[lane];
          if (event.bytes > 0) {
            events.push_back(&event);
            lanes.push_back(lane);
          }
        }
      }
    }
    if (!events.empty()) {
      count(events, lanes);
    }
  }
}

}  // namespace

void watch(bool is_to_be) { watched = is_to_be; }
bool is_watched() { return watched.load(std::memory_order_relaxed); }

void begin_launch(const char* name, unsigned count) {
  kernel = name;
  threads.resize(count);
}

void begin_block() {
  if (nodes.empty()) {
    nodes.push_back({kRoot, nullptr});
  }
  for (auto& thread : threads) {
    thread.node = kRoot;
    thread.events.clear();
  }
}

void end_block() {
  rank_sites();
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t first = 0; first < threads.size(); first += kLanes) {
    put_together(threads.data() + first);
  }
}

void access(unsigned i, uintptr_t address, unsigned bytes, Kind kind, const void* instruction) {
  auto& thread = threads[i];
  const uint32_t site = site_of(thread, instruction);
  thread.events.push_back({site, static_cast<uint8_t>(bytes), kind, address});
}

void come_to(unsigned i, const void* instruction) {
  auto& thread = threads[i];
  thread.events.push_back({site_of(thread, instruction), 0, Kind::kGlobalLoad, 0});
}

void enter(unsigned i, const void* call) {
  auto& thread = threads[i];
  const auto [found, is_new] =
      node_numbers.try_emplace({thread.node, call}, static_cast<uint32_t>(nodes.size()));
  if (is_new) {
    nodes.push_back({thread.node, call});
  }
  thread.node = found->second;
}

void leave(unsigned i) {
  auto& thread = threads[i];
  thread.node = nodes[thread.node].parent;
}

std::vector<Cost> take() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<Cost> all;
  for (auto& [key, cost] : costs) {
    all.push_back(std::move(cost));
  }
  costs.clear();
  return all;
}

}  // namespace on_host::requests
