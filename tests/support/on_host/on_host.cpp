#include "on_host.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <setjmp.h>
#include <torch/library.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "places.h"
#include "races.h"
#include "requests.h"
#include "thread.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

thread_local Dim threadIdx;
thread_local Dim blockIdx;
thread_local Dim blockDim;
thread_local Dim gridDim;

namespace on_host {

Properties properties{2, 2048};
int8_t device = 0;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr int kNoMeaning = 0xa5;

// The data that AddressSanitizer needs when execution changes stacks.
struct Stack {
  const void* bottom = nullptr;
  size_t bytes = 0;
  void* fake = nullptr;
};

#ifdef __SANITIZE_ADDRESS__
void leave_stack(Stack& from, const Stack& to) {
  __sanitizer_start_switch_fiber(&from.fake, to.bottom, to.bytes);
}
void come_to_stack(const Stack& now, Stack* from) {
  __sanitizer_finish_switch_fiber(now.fake, from == nullptr ? nullptr : &from->bottom,
                                  from == nullptr ? nullptr : &from->bytes);
}
#else
void leave_stack(Stack&, const Stack&) {}
void come_to_stack(const Stack&, Stack*) {}
#endif

enum class Wait { kNone, kBlock, kWarp, kLane, kWrong, kOtherBlock, kEnd };

struct Thread {
  std::unique_ptr<char[]> memory;
  Stack stack;
  ucontext_t start;
  jmp_buf here;
  bool has_started = false;
  Wait wait = Wait::kEnd;
  Place barrier{nullptr, 0};    // the barrier at which it waits
  uint32_t lanes = 0;           // lanes for which a warp's barrier waits
  std::vector<uint64_t> given;  // values for other lanes, in this block
  const Thread* source = nullptr;
  size_t number = 0;  // the number of values that the source must have given
};

std::mutex mutex;
std::vector<std::string> launched;  // since take_launched() was last called

// Each thread of the host has one launch at a time. Launches of several threads run at once, since
// kernels of several ranks may wait for each other.
std::atomic<unsigned> seeds{0};
thread_local std::mt19937 rng(seeds++);
thread_local std::vector<std::unique_ptr<Thread>> threads;
thread_local Thread* running = nullptr;
thread_local jmp_buf scheduler;
thread_local Stack scheduler_stack;
thread_local void (*kernel)(const void*) = nullptr;
thread_local const void* kernel_context = nullptr;
thread_local std::unique_ptr<char[]> memory;    // a block's dynamic shared memory
thread_local std::unordered_set<void*> begun;   // the block's variables that have been filled
thread_local Observed thread_told;              // for the observers
thread_local std::vector<Range> shared_memory;  // of the block
thread_local std::set<std::pair<const char*, int>> reached;  // barriers of the launch

struct Barriers {
  // The name of the omitted barrier; empty for none. No kernel runs when it changes.
  std::string omitted;
  std::set<std::pair<const char*, int>> reached;  // since they were last taken
};
Barriers barriers;

// A barrier's file, with its folder, and line: "cuda/topk.cu:48".
std::string name_of(const Place& barrier) {
  const std::string file = barrier.file;
  const auto folder = file.rfind('/', file.rfind('/') - 1);
  return file.substr(folder == std::string::npos ? 0 : folder + 1) + ":" +
         std::to_string(barrier.line);
}

[[gnu::noinline]] void leave() {
  if (_setjmp(running->here) == 0) {
    leave_stack(running->stack, scheduler_stack);
    _longjmp(scheduler, 1);
  }
  come_to_stack(running->stack, nullptr);
}

void run_kernels() {
  come_to_stack({}, &scheduler_stack);
  for (;;) {
    kernel(kernel_context);
    running->wait = Wait::kEnd;
    leave();
  }
}

[[gnu::noinline]] void enter(Thread* thread) {
  running = thread;
  thread_told.thread = threadIdx.x;
  const auto bottom = reinterpret_cast<uintptr_t>(thread->memory.get());
  thread_told.stack = {bottom, bottom + kStackBytes};
  observed = &thread_told;
  if (_setjmp(scheduler) == 0) {
    leave_stack(scheduler_stack, thread->stack);
    if (thread->has_started) {
      _longjmp(thread->here, 1);
    }
    thread->has_started = true;
    setcontext(&thread->start);
  }
  observed = nullptr;
  come_to_stack(scheduler_stack, nullptr);
}

void make_threads(size_t count) {
  while (threads.size() < count) {
    auto thread = std::make_unique<Thread>();
    thread->memory = std::make_unique<char[]>(kStackBytes);
    thread->stack = {thread->memory.get(), kStackBytes, nullptr};
    getcontext(&thread->start);
    thread->start.uc_stack.ss_sp = thread->memory.get();
    thread->start.uc_stack.ss_size = kStackBytes;
    thread->start.uc_link = nullptr;
    makecontext(&thread->start, run_kernels, 0);
    threads.push_back(std::move(thread));
  }
}

bool all_wait(unsigned first, unsigned count, Wait wait) {
  return std::all_of(threads.begin() + first, threads.begin() + first + count,
                     [wait](const auto& thread) { return thread->wait == wait; });
}

void tell_barriers() {
  const std::lock_guard<std::mutex> lock(mutex);
  barriers.reached.merge(reached);
  reached.clear();
}

// If the test omits a barrier, threads still wait there, so that they do not use wrong values as an
// index. But it orders nothing.
bool orders(const Place& barrier) {
  return barriers.omitted.empty() || name_of(barrier) != barriers.omitted;
}

// The lanes of a warp for which everything that they wait for has come.
std::vector<unsigned> released_lanes(unsigned first) {
  std::vector<unsigned> released;
  uint32_t done = 0;  // lanes that a barrier has ordered
  for (unsigned own = first; own < first + kLanes; ++own) {
    if (threads[own]->wait == Wait::kLane) {
      if (threads[own]->source->given.size() > threads[own]->number) {
        released.push_back(own);
      }
      continue;
    }
    bool is_complete = threads[own]->wait == Wait::kWarp;
    for (unsigned lane = 0; lane < kLanes && is_complete; ++lane) {
      const auto& other = *threads[first + lane];
      is_complete = (threads[own]->lanes >> lane & 1) == 0 ||
                    (other.wait == Wait::kWarp && other.lanes == threads[own]->lanes);
    }
    if (is_complete) {
      released.push_back(own);
      if ((done >> (own - first) & 1) == 0 && orders(threads[own]->barrier)) {
        races::cross_warp_barrier(first, threads[own]->lanes);
      }
      done |= threads[own]->lanes;
    }
  }
  return released;
}

// Runs the warp up to the block's next barrier, however far the other warps are.
void run_warp(unsigned first) {
  std::vector<unsigned> ready(kLanes);
  std::iota(ready.begin(), ready.end(), first);
  while (!ready.empty()) {
    std::shuffle(ready.begin(), ready.end(), rng);
    for (const unsigned i : ready) {
      threads[i]->wait = Wait::kNone;
      threadIdx.x = i;
      enter(threads[i].get());
    }
    ready = released_lanes(first);
  }
}

bool all_order(unsigned count) {
  return std::all_of(threads.begin(), threads.begin() + count,
                     [](const auto& thread) { return orders(thread->barrier); });
}

void run_block(unsigned count, size_t shared_bytes) {
  std::memset(memory.get(), kNoMeaning, shared_bytes);
  begun.clear();
  const auto begin = reinterpret_cast<uintptr_t>(memory.get());
  shared_memory = {{begin, begin + shared_bytes}};
  races::begin_block(blockIdx.x);
  if (requests::is_watched()) {
    requests::begin_block();
  }
  for (unsigned i = 0; i < count; ++i) {
    threads[i]->given.clear();
  }
  std::vector<unsigned> warps(count / kLanes);
  std::iota(warps.begin(), warps.end(), 0);
  for (;;) {
    std::shuffle(warps.begin(), warps.end(), rng);
    for (const unsigned warp : warps) {
      run_warp(warp * kLanes);
    }
    if (!all_wait(0, count, Wait::kBlock)) {
      break;
    }
    if (all_order(count)) {
      races::cross_block_barrier();
    }
  }
  const auto has = [count](Wait wait) {
    return std::any_of(threads.begin(), threads.begin() + count,
                       [wait](const auto& each) { return each->wait == wait; });
  };
  const bool is_wrong = has(Wait::kWrong);
  const bool waits_for_block = has(Wait::kOtherBlock);
  if (!all_wait(0, count, Wait::kEnd)) {
    threads.clear();  // with the values that they refer to
    TORCH_CHECK(!is_wrong, "on_host: a shuffle must be one of all lanes of the warp");
    TORCH_CHECK(!waits_for_block, "on_host: a block waits for one that need not have begun");
    TORCH_CHECK(false, "on_host: threads wait for others that do not come");
  }
  for (unsigned i = 0; i < count; ++i) {
    TORCH_CHECK(threads[i]->given.size() == threads[i / kLanes * kLanes]->given.size(),
                "on_host: lanes of a warp have left out a shuffle");
  }
  if (requests::is_watched()) {
    requests::end_block();
  }
}

void wait_as(Wait wait) {
  running->wait = wait;
  leave();
}

void wait_at(Place barrier, Wait wait) {
  running->barrier = barrier;
  reached.emplace(barrier.file, barrier.line);
  wait_as(wait);
}

// The stack from one of its frames on, without the frames that this one calls.
Range stack_above(const void* frame) {
  thread_local const void* const end = [] {
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    void* bottom = nullptr;
    size_t bytes = 0;
    pthread_attr_getstack(&attributes, &bottom, &bytes);
    pthread_attr_destroy(&attributes);
    return static_cast<const char*>(bottom) + bytes;
  }();
  return {reinterpret_cast<uintptr_t>(frame), reinterpret_cast<uintptr_t>(end)};
}

}  // namespace

thread_local const Observed* observed = nullptr;

bool is_shared(uintptr_t address) {
  return std::any_of(shared_memory.begin(), shared_memory.end(),
                     [address](const Range& range) { return range.contains(address); });
}

void run_launch(const char* name, unsigned blocks, unsigned count, size_t shared_bytes,
                void (*run)(const void*), const void* context) {
  TORCH_CHECK(blocks > 0 && count > 0 && count <= 1024 && count % kLanes == 0,
              "on_host: no launch of ", blocks, " blocks of ", count, " threads");
  TORCH_CHECK(shared_bytes <= 48 * 1024, "on_host: no block has ", shared_bytes, " bytes");
  {
    const std::lock_guard<std::mutex> lock(mutex);
    launched.emplace_back(name);
  }
  make_threads(count);
  kernel = run;
  kernel_context = context;
  thread_told.arguments = stack_above(__builtin_frame_address(0));
  races::begin_launch(name, count);
  if (requests::is_watched()) {
    requests::begin_launch(name, count);
  }
  memory = std::make_unique<char[]>(shared_bytes);
  blockDim.x = count;
  gridDim.x = blocks;
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), rng);
  for (const unsigned block : order) {
    blockIdx.x = block;
    run_block(count, shared_bytes);
  }
  tell_barriers();
  const auto found = races::end_launch();
  TORCH_CHECK(found.empty(), found);
}

void* dynamic_memory() { return memory.get(); }

void begin_static(void* variable, size_t bytes) {
  if (begun.insert(variable).second) {
    std::memset(variable, kNoMeaning, bytes);
    const auto begin = reinterpret_cast<uintptr_t>(variable);
    shared_memory.push_back({begin, begin + bytes});
  }
}

void wait_for_block(Place place) { wait_at(place, Wait::kBlock); }

void wait_for_warp(uint32_t lanes, Place place) {
  running->lanes = lanes;
  wait_at(place, Wait::kWarp);
}

void wait_for_other_block() { wait_as(Wait::kOtherBlock); }

void exchange(uint32_t lanes, const void* given, void* taken, size_t bytes, int from) {
  if (~lanes != 0) {
    wait_as(Wait::kWrong);
  }
  const size_t number = running->given.size();
  std::memcpy(&running->given.emplace_back(), given, bytes);
  const Thread* source = threads[threadIdx.x / kLanes * kLanes + static_cast<unsigned>(from)].get();
  if (source->given.size() <= number) {
    running->source = source;
    running->number = number;
    wait_as(Wait::kLane);
  }
  std::memcpy(taken, &source->given[number], bytes);
}

// ---- the interface for tests -------------------------------------------------------------------

namespace {

std::vector<std::string> take_launched() {
  const std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(launched, {});
}

// Sets the number of warps that fit on the device at once.
void set_warps(int64_t warps) {
  constexpr int64_t kMost = 64;  // in a multiprocessor
  TORCH_CHECK(warps >= 1 && (warps < kMost || warps % kMost == 0),
              "on_host: no device has room for ", warps, " warps");
  const auto multiprocessors = std::max<int64_t>(warps / kMost, 1);
  properties = {static_cast<int>(multiprocessors),
                static_cast<int>(warps / multiprocessors * kLanes)};
  static std::map<int64_t, int8_t> devices;
  device = devices.emplace(warps, static_cast<int8_t>(devices.size() + 1)).first->second;
  TORCH_CHECK(devices.size() < INT8_MAX, "on_host: too many devices");
}

// Forbids the kernels the 16 bytes past the end of each of these contiguous tensors.
void forbid_past(at::TensorList tensors) {
  constexpr uintptr_t kBytes = 16;
  std::vector<Range> ranges;
  for (const auto& tensor : tensors) {
    const auto end = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) + tensor.nbytes();
    ranges.push_back({end, end + kBytes});
  }
  races::forbid(std::move(ranges));
}

void omit_barrier(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex);
  barriers.omitted = name;
}

std::vector<std::string> take_barriers() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::set<std::string> names;  // each source that includes a header has its own kernels
  for (const auto& [file, line] : std::exchange(barriers.reached, {})) {
    names.insert(name_of({file, line}));
  }
  return {names.begin(), names.end()};
}

// For each instruction of a kernel that has accessed memory: the kernel, the place, and a row of
// kind, requests, parts, the fewest parts, bytes.
std::tuple<std::vector<std::string>, std::vector<std::string>, at::Tensor> take_requests() {
  constexpr int64_t kColumns = 5;
  const auto costs = requests::take();
  std::vector<std::string> kernels;
  std::vector<const void*> instructions;
  auto rows = at::empty({static_cast<int64_t>(costs.size()), kColumns}, at::kLong);
  auto* row = rows.mutable_data_ptr<int64_t>();
  for (const auto& cost : costs) {
    kernels.push_back(cost.kernel);
    instructions.push_back(cost.instruction);
    for (const int64_t value :
         {static_cast<int64_t>(cost.kind), cost.requests, cost.parts, cost.fewest, cost.bytes}) {
      *row++ = value;
    }
  }
  return {kernels, lines_of(instructions), rows};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(commhook_on_host, m) {
  m.def("take_launched() -> str[]", take_launched);
  m.def("set_warps(int warps) -> ()", set_warps);
  m.def("omit_barrier(str name) -> ()", [](const std::string& name) { omit_barrier(name); });
  m.def("take_barriers() -> str[]", take_barriers);
  m.def("forbid_past(Tensor[] tensors) -> ()", forbid_past);
  m.def("watch_requests(bool is_watched) -> ()", requests::watch);
  m.def("take_requests() -> (str[], str[], Tensor)", take_requests);
}

}  // namespace on_host
