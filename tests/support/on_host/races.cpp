#include "races.h"

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <sstream>
#include <unordered_map>
#include <utility>
#include <vector>

#include "places.h"

namespace on_host::races {
namespace {

constexpr unsigned kLanes = 32;
constexpr size_t kPageBytes = 1024;
constexpr size_t kMostTold = 4;

// A thread's work between two of its barriers and fences.
struct Segment {
  uint32_t block;
  uint32_t thread;
  uint32_t phase;  // barriers of the whole block before it
  uint32_t step;   // number of the thread's segment, ascending
};

// Segments of many blocks that come before something: for each block those of the phases before
// one, and for some threads those up to a step.
struct Clock {
  struct OfBlock {
    uint32_t phase = 0;
    std::unordered_map<uint32_t, uint32_t> steps;
  };
  std::unordered_map<uint32_t, OfBlock> blocks;

  bool has(const Segment& segment) const {
    const auto found = blocks.find(segment.block);
    if (found == blocks.end()) {
      return false;
    }
    const auto step = found->second.steps.find(segment.thread);
    return segment.phase < found->second.phase ||
           (step != found->second.steps.end() && segment.step <= step->second);
  }

  void add(uint32_t block, uint32_t phase, uint32_t thread, uint32_t step) {
    auto& own = blocks[block];
    own.phase = std::max(own.phase, phase);
    auto& known = own.steps[thread];
    known = std::max(known, step);
  }
};
// Few threads have a clock, and a block's threads share one after its next barrier.
using SharedClock = std::shared_ptr<const Clock>;

SharedClock joined(const SharedClock& a, const SharedClock& b) {
  if (a == nullptr || a == b) {
    return b;
  }
  if (b == nullptr) {
    return a;
  }
  auto both = std::make_shared<Clock>(*a);
  for (const auto& [block, other] : b->blocks) {
    auto& own = both->blocks[block];
    own.phase = std::max(own.phase, other.phase);
    for (const auto& [thread, step] : other.steps) {
      own.steps[thread] = std::max(own.steps[thread], step);
    }
  }
  return both;
}

// Everything that comes before the next access of a thread of the running block, except the block's
// earlier phases.
struct Thread {
  uint32_t segment;                    // the thread's current segment
  uint32_t step;                       // that segment's step
  std::array<uint32_t, kLanes> known;  // known steps of the warp's lanes
  SharedClock foreign;                 // known by atomics and fences
  SharedClock released;                // known before its last fence
  SharedClock seen;                    // learned by atomic reads since then
};

struct Access {
  uint32_t segment;
  uint32_t instruction;
};
constexpr Access kNone{UINT32_MAX, 0};

// Accesses of a byte that no later access has replaced.
struct Several {
  std::vector<Access> accesses;
  size_t limit = 64;
};
struct Rare {
  Several reads;
  Several atomic_reads;
  Several atomic_writes;
};
struct Byte {
  Access write = kNone;
  Access read = kNone;  // the only access, otherwise all are in rare
  std::unique_ptr<Rare> rare;
};
struct Page {
  std::array<Byte, kPageBytes> bytes;
};

struct Told {
  Access first;
  Access second;
  const char* what;  // description of the first race
};
// A launch; each thread of the host has one at a time.
struct Launch {
  std::string kernel;
  unsigned thread_count;
  uint32_t block;
  uint32_t phase;
  std::vector<Segment> segments;
  std::vector<Thread> threads;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> global_pages;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> shared_pages;
  std::unordered_map<uintptr_t, SharedClock> atomics;
  std::unordered_map<const void*, uint32_t> instruction_numbers;
  std::vector<const void*> instructions;
  std::vector<Told> told;
  std::set<std::pair<uint32_t, uint32_t>> told_pairs;
  const void* stray = nullptr;  // an instruction that touched forbidden memory

  void begin_segment(unsigned i);
  bool comes_before(uint32_t segment, const Thread& thread, unsigned i) const;
  Byte* bytes_at(uintptr_t address, bool is_shared);
  uint32_t number_of(const void* instruction);
  SharedClock clock_of(unsigned i) const;
  void begin_step(unsigned i);
  void exchange_clocks(unsigned i, uintptr_t address, Kind kind);
};
thread_local Launch now;
std::vector<Range> forbidden;

void Launch::begin_segment(unsigned i) {
  threads[i].segment = static_cast<uint32_t>(segments.size());
  segments.push_back({block, i, phase, threads[i].step});
}

bool Launch::comes_before(uint32_t segment, const Thread& thread, unsigned i) const {
  const Segment& other = segments[segment];
  if (other.block == block) {
    if (other.thread == i || other.phase < phase) {
      return true;
    }
    if (other.thread / kLanes == i / kLanes && other.step <= thread.known[other.thread % kLanes]) {
      return true;
    }
  }
  return thread.foreign != nullptr && thread.foreign->has(other);
}

Byte* Launch::bytes_at(uintptr_t address, bool is_shared) {
  auto& page = (is_shared ? shared_pages : global_pages)[address / kPageBytes];
  if (page == nullptr) {
    page = std::make_unique<Page>();
  }
  return page->bytes.data() + address % kPageBytes;
}

// Compares one access with all that it may race with.
class Check {
 public:
  Check(Launch& launch, unsigned i, const void* instruction)
      : launch_(launch),
        i_(i),
        thread_(launch.threads[i]),
        own_{thread_.segment, launch.number_of(instruction)} {}

  void read(Byte& byte) {
    against(byte.write, "a write");
    if (byte.rare != nullptr) {
      against(byte.rare->atomic_writes, "an atomic write");
      add(byte.rare->reads);
    } else if (byte.read.segment == UINT32_MAX || is_ordered(byte.read)) {
      byte.read = own_;
    } else {
      byte.rare = std::make_unique<Rare>();
      byte.rare->reads.accesses = {byte.read, own_};
    }
  }

  void write(Byte& byte) {
    against(byte.write, "a write");
    if (byte.rare != nullptr) {
      against(byte.rare->reads, "a read");
      against(byte.rare->atomic_reads, "an atomic read");
      against(byte.rare->atomic_writes, "an atomic write");
      byte.rare.reset();  // an access that races with these also races with this write
    } else {
      against(byte.read, "a read");
    }
    byte.read = kNone;
    byte.write = own_;
  }

  void atomic(Byte& byte, bool reads, bool writes) {
    if (byte.rare == nullptr) {
      byte.rare = std::make_unique<Rare>();
      if (byte.read.segment != UINT32_MAX) {
        byte.rare->reads.accesses = {byte.read};
      }
    }
    against(byte.write, "a write");
    if (writes) {
      against(byte.rare->reads, "a read");
      add(byte.rare->atomic_writes);
    }
    if (reads) {
      add(byte.rare->atomic_reads);
    }
  }

 private:
  // The bytes of one access usually have the same earlier accesses.
  bool is_ordered(const Access& other) const {
    if (other.segment != ordered_ && launch_.comes_before(other.segment, thread_, i_)) {
      ordered_ = other.segment;
    }
    return other.segment == ordered_;
  }

  void against(const Access& other, const char* what) const {
    if (other.segment == UINT32_MAX || is_ordered(other)) {
      return;
    }
    if (launch_.told_pairs.insert(std::minmax(other.instruction, own_.instruction)).second) {
      launch_.told.push_back({other, own_, what});
    }
  }

  void against(const Several& others, const char* what) const {
    for (const auto& other : others.accesses) {
      against(other, what);
    }
  }

  // An access that comes before this one need not stay: a race with it is also a race with this
  // one.
  void add(Several& several) const {
    auto& all = several.accesses;
    if (!all.empty() && is_ordered(all.back())) {
      all.back() = own_;
      return;
    }
    if (all.size() >= several.limit) {
      std::erase_if(all, [this](const Access& other) { return is_ordered(other); });
      several.limit = std::max<size_t>(64, 2 * all.size());
    }
    all.push_back(own_);
  }

  Launch& launch_;
  unsigned i_;
  const Thread& thread_;
  Access own_;
  mutable uint32_t ordered_ = own_.segment;
};

uint32_t Launch::number_of(const void* instruction) {
  const auto [found, is_new] =
      instruction_numbers.try_emplace(instruction, static_cast<uint32_t>(instructions.size()));
  if (is_new) {
    instructions.push_back(instruction);
  }
  return found->second;
}

// Everything that comes before the next access of a thread, including its own accesses.
SharedClock Launch::clock_of(unsigned i) const {
  const Thread& thread = threads[i];
  auto clock = thread.foreign == nullptr ? std::make_shared<Clock>()
                                         : std::make_shared<Clock>(*thread.foreign);
  const unsigned first = i / kLanes * kLanes;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    clock->add(block, phase, first + lane, thread.known[lane]);
  }
  clock->add(block, phase, i, thread.step);
  return clock;
}

void Launch::begin_step(unsigned i) {
  ++threads[i].step;
  begin_segment(i);
}

void Launch::exchange_clocks(unsigned i, uintptr_t address, Kind kind) {
  auto& clock = atomics[address];
  Thread& thread = threads[i];
  switch (kind) {
    case Kind::kAtomicRead:
      thread.seen = joined(thread.seen, clock);
      break;
    case Kind::kAtomicBoth:
      thread.seen = joined(thread.seen, clock);
      clock = joined(clock, thread.released);
      break;
    case Kind::kAtomicWrite:
      clock = thread.released;  // a plain write drops the releases of other threads
      break;
    case Kind::kAcquire:
      thread.foreign = joined(thread.foreign, clock);
      break;
    case Kind::kRelease:
      clock = clock_of(i);
      begin_step(i);
      break;
    default:
      break;
  }
}

}  // namespace

void begin_launch(const char* name, unsigned count) {
  now = Launch{};
  now.kernel = name;
  now.thread_count = count;
}

void begin_block(unsigned index) {
  now.block = index;
  now.phase = 0;
  now.shared_pages.clear();
  now.threads.assign(now.thread_count, Thread{0, 1, {}, nullptr, nullptr, nullptr});
  for (unsigned i = 0; i < now.thread_count; ++i) {
    now.begin_segment(i);
  }
}

void cross_warp_barrier(unsigned first, uint32_t lanes) {
  std::array<uint32_t, kLanes> known{};
  SharedClock foreign;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) != 0) {
      const auto& thread = now.threads[first + lane];
      for (unsigned other = 0; other < kLanes; ++other) {
        known[other] = std::max(known[other], thread.known[other]);
      }
      known[lane] = std::max(known[lane], thread.step);
      foreign = joined(foreign, thread.foreign);
    }
  }
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) != 0) {
      auto& thread = now.threads[first + lane];
      thread.known = known;
      thread.foreign = foreign;
      ++thread.step;
      now.begin_segment(first + lane);
    }
  }
}

void cross_block_barrier() {
  ++now.phase;
  SharedClock foreign;
  for (const auto& thread : now.threads) {
    foreign = joined(foreign, thread.foreign);
  }
  for (unsigned i = 0; i < now.thread_count; ++i) {
    now.threads[i].foreign = foreign;
    ++now.threads[i].step;
    now.begin_segment(i);
  }
}

void cross_fence(unsigned i) {
  auto& thread = now.threads[i];
  thread.foreign = joined(thread.foreign, std::exchange(thread.seen, nullptr));
  thread.released = now.clock_of(i);
  now.begin_step(i);
}

void access(unsigned i, uintptr_t address, unsigned bytes, Kind kind, bool is_shared,
            const void* instruction) {
  Launch& launch = now;
  Check check(launch, i, instruction);
  if (!is_shared && std::any_of(forbidden.begin(), forbidden.end(), [&](const Range& range) {
        return address < range.end && range.begin < address + bytes;
      })) {
    launch.stray = instruction;
  }
  // For an atomic access:
  const bool reads = kind != Kind::kAtomicWrite && kind != Kind::kRelease;
  const bool writes = kind != Kind::kAtomicRead && kind != Kind::kAcquire;
  for (unsigned done = 0; done < bytes;) {
    Byte* const at = launch.bytes_at(address + done, is_shared);
    const auto left = static_cast<unsigned>(kPageBytes - (address + done) % kPageBytes);
    const unsigned count = std::min(bytes - done, left);
    for (unsigned k = 0; k < count; ++k) {
      switch (kind) {
        case Kind::kRead:
          check.read(at[k]);
          break;
        case Kind::kWrite:
          check.write(at[k]);
          break;
        default:
          check.atomic(at[k], reads, writes);
      }
    }
    done += count;
  }
  if (kind != Kind::kRead && kind != Kind::kWrite) {
    launch.exchange_clocks(i, address, kind);
  }
}

std::string end_launch() {
  const Launch ended = std::exchange(now, Launch{});
  if (ended.stray != nullptr) {
    return "on_host: forbidden memory is accessed by " + ended.kernel + " at " +
           lines_of({ended.stray}).front();
  }
  const auto& told = ended.told;
  if (told.empty()) {
    return {};
  }
  std::vector<const void*> at;
  for (size_t i = 0; i < std::min(told.size(), kMostTold); ++i) {
    at.push_back(ended.instructions[told[i].first.instruction]);
    at.push_back(ended.instructions[told[i].second.instruction]);
  }
  const auto lines = lines_of(at);
  std::ostringstream words;
  words << "on_host: no barrier orders accesses of " << ended.kernel;
  for (size_t i = 0; 2 * i < lines.size(); ++i) {
    const auto& first = ended.segments[told[i].first.segment];
    const auto& second = ended.segments[told[i].second.segment];
    words << "\n  " << told[i].what << " of thread " << first.thread << " of block " << first.block
          << " at " << lines[2 * i] << "\n    and one of thread " << second.thread << " of block "
          << second.block << " at " << lines[2 * i + 1];
  }
  if (told.size() > kMostTold) {
    words << "\n  and " << told.size() - kMostTold << " more pairs";
  }
  return words.str();
}

void forbid(std::vector<Range> ranges) { forbidden = std::move(ranges); }

}  // namespace on_host::races
