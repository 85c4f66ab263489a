// Plays how the CUDA kernels move rows, on the host: every lane of every warp of every launch, on
// memory whose surroundings must not be touched. Run by test_cuda_partition.py.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "host_program.h"
#include "row.h"

namespace {

using namespace commhook::cuda;

// Memory between two pages that may not be touched, or, if exact, memory whose last byte is the
// last that may be: AddressSanitizer sees others. The kernels read whole granules of 16 bytes
// around a row's beginning: never one that the row is not part of.
class Fenced {
 public:
  explicit Fenced(size_t bytes, bool is_exact = false) {
    if (is_exact) {
      void* memory = nullptr;
      EXPECT(posix_memalign(&memory, 256, bytes) == 0, "%zu bytes", bytes);
      base_ = begin_ = static_cast<char*>(memory);
      size_ = bytes;
      mapped_ = 0;
      return;
    }
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page;
    mapped_ = size_ + 2 * page;
    base_ =
        static_cast<char*>(mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT(base_ != MAP_FAILED, "%zu bytes", mapped_);
    begin_ = base_ + page;
    EXPECT(mprotect(begin_, size_, PROT_READ | PROT_WRITE) == 0, "%zu bytes", size_);
  }
  Fenced(const Fenced&) = delete;
  ~Fenced() {
    if (mapped_ == 0) {
      std::free(base_);
    } else {
      munmap(base_, mapped_);
    }
  }

  char* begin() const { return begin_; }
  size_t size() const { return size_; }

 private:
  char* base_;
  char* begin_;
  size_t size_;
  size_t mapped_;
};

template <typename T>
constexpr Dtype kDtypeOf = Dtype::kDouble;
template <>
constexpr Dtype kDtypeOf<float> = Dtype::kFloat;
template <>
constexpr Dtype kDtypeOf<c10::Half> = Dtype::kHalf;
template <>
constexpr Dtype kDtypeOf<c10::BFloat16> = Dtype::kBFloat16;

template <typename T>
void visit(Dtype dtype, const T& call) {
  switch (dtype) {
    case Dtype::kDouble:
      return call(double{});
    case Dtype::kFloat:
      return call(float{});
    case Dtype::kHalf:
      return call(c10::Half{});
    case Dtype::kBFloat16:
      return call(c10::BFloat16{});
  }
}

void write_value(void* at, Dtype dtype, double value) {
  visit(dtype, [&](auto tag) {
    using T = decltype(tag);
    const T rounded = round_to<T>(value);
    std::memcpy(at, &rounded, sizeof(T));
  });
}

// What one element must become, by another way than the kernels'.
template <typename To>
To expected(const void* at, Dtype dtype, double scale) {
  To result{};
  visit(dtype, [&](auto tag) {
    using From = decltype(tag);
    From value;
    std::memcpy(&value, at, sizeof(From));
    if constexpr (std::is_same_v<To, double>) {
      result = static_cast<double>(value) * scale;
    } else if constexpr (std::is_same_v<From, double>) {
      result = static_cast<To>(static_cast<float>(value * scale));
    } else {
      result = static_cast<To>(static_cast<float>(value) * static_cast<float>(scale));
    }
  });
  return result;
}

// Tensors of random lengths, each at a random place of fenced memory, often at the very ends of it.
struct Tensors {
  std::vector<Dtype> dtypes;
  std::vector<int64_t> numels;
  std::vector<std::unique_ptr<Fenced>> memory;
  std::vector<char*> data;
  int64_t total = 0;

  void add(Dtype dtype, int64_t numel) {
    const auto size = bytes_of(dtype);
    int64_t place = below(16);
    if (below(2) == 0) {
      memory.push_back(std::make_unique<Fenced>(
          static_cast<size_t>(std::max<int64_t>(1, (place + numel) * size)), true));
    } else {
      memory.push_back(std::make_unique<Fenced>(static_cast<size_t>(numel * size + 64)));
      const auto room = (static_cast<int64_t>(memory.back()->size()) - numel * size) / size;
      const int64_t choice = below(3);
      place = choice == 0 ? 0 : choice == 1 ? room : std::min(room, place);
    }
    const auto& fenced = *memory.back();
    data.push_back(fenced.begin() + place * size);
    dtypes.push_back(dtype);
    numels.push_back(numel);
    total += numel;
  }

  template <typename Data>
  std::vector<Segment<Data>> segments() const {
    std::vector<Segment<Data>> list;
    for (size_t i = 0; i < data.size(); ++i) {
      if (numels[i] > 0) {
        list.push_back({data[i], numels[i], dtypes[i]});
      }
    }
    return list;
  }
};

int64_t random_numel() {
  switch (below(8)) {
    case 0:
      return 0;
    case 1:
      return 1 + below(3);
    case 2:
      return 64;
    case 3:
      return 4096 + below(9) - 4;
    case 4:
      return 1 + below(20000);
    default:
      return 1 + below(300);
  }
}

Tensors random_tensors(int count, int dtype) {
  Tensors tensors;
  for (int i = 0; i < count; ++i) {
    tensors.add(static_cast<Dtype>(dtype < 0 ? below(4) : dtype), random_numel());
  }
  return tensors;
}

double random_value() {
  switch (below(12)) {
    case 0:
      return INFINITY;
    case 1:
      return NAN;
    case 2:
      return 65519.9 + static_cast<double>(below(3));
    case 3:
      return 1e-41 * static_cast<double>(below(100));
    default:
      return std::ldexp(static_cast<double>(below(1 << 30)) - (1 << 29), -28);
  }
}

// Whether the bits agree; one NaN is as good as another.
template <typename T>
bool same(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0 || (a != a && b != b);
}

// Runs play(run, lane) for all lanes of a launch over the table.
template <typename Play>
void launch(int64_t total, int warps, const Play& play) {
  const int run = run_length(total, warps);
  EXPECT(run >= kMinRun && run <= kMaxRun && (run & (run - 1)) == 0, "run %d", run);
  const int64_t blocks = block_count(total, run);
  int64_t next = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int warp = 0; warp < kWarpsPerBlock; ++warp) {
      const Run part = run_of(block, warp, run, total);
      if (part.begin < part.end) {
        EXPECT(part.begin == next, "run at %lld", static_cast<long long>(part.begin));
        next = part.end;
      }
      for (int lane = 0; lane < kWarpSize; ++lane) {
        play(part, lane);
      }
    }
  }
  EXPECT(next == total, "%lld of %lld", static_cast<long long>(next),
         static_cast<long long>(total));
}

// A buffer of `total` elements in fenced memory, with a pattern around it that must stay.
template <typename T>
struct Buffer {
  Fenced memory;
  T* data;
  int64_t total;
  static constexpr char kPattern = 0x5a;

  explicit Buffer(int64_t total)
      : memory(static_cast<size_t>(total) * sizeof(T) + 64), total(total) {
    std::memset(memory.begin(), kPattern, memory.size());
    const int64_t room = static_cast<int64_t>(memory.size() / sizeof(T)) - total;
    const int64_t place = below(2) == 0 ? 0 : below(2) == 0 ? room : std::min(room, below(16));
    data = reinterpret_cast<T*>(memory.begin()) + place;
  }
  bool is_surrounded() const {
    const auto* first = reinterpret_cast<const char*>(data);
    const auto* last = reinterpret_cast<const char*>(data + total);
    return std::all_of(static_cast<const char*>(memory.begin()), first,
                       [](char c) { return c == kPattern; }) &&
           std::all_of(last, static_cast<const char*>(memory.begin()) + memory.size(),
                       [](char c) { return c == kPattern; });
  }
};

constexpr double kScales[] = {1.0, 0.125, 1.0 / 3.0, 3e4};

template <typename To, int kCapacity>
void check_flatten(int count, int dtype) {
  auto tensors = random_tensors(count, dtype);
  for (size_t i = 0; i < tensors.data.size(); ++i) {
    for (int64_t j = 0; j < tensors.numels[i]; ++j) {
      const auto size = bytes_of(tensors.dtypes[i]);
      write_value(tensors.data[i] + j * size, tensors.dtypes[i], random_value());
    }
  }
  const double scale = kScales[below(4)];
  const int warps = 1 + static_cast<int>(below(9000));
  const Buffer<To> buffer(tensors.total);
  const auto segments = tensors.segments<const void>();

  double sum_of_squares = 0;
  int64_t nonfinite_count = 0;
  struct Counter : Measure {
    int64_t added = 0;
    void add(double value, To written) { Measure::add(value, written), ++added; }
    void add(float value, To written) { Measure::add(value, written), ++added; }
  };
  int64_t added = 0;
  TensorTable<const void, kCapacity> table;
  int64_t offset = 0;
  for (size_t first = 0; first < segments.size();) {
    first +=
        static_cast<size_t>(fill_table(table, segments.data() + first, segments.size() - first));
    launch(table.total, warps, [&](Run run, int lane) {
      Counter meter;
      flatten_run(table, buffer.data + offset, scale, run, lane, meter);
      sum_of_squares += meter.sum_of_squares;
      nonfinite_count += meter.nonfinite_count;
      added += meter.added;
    });
    offset += table.total;
  }
  // Each element once: a second lane at the same element could write while it is read.
  EXPECT(offset == tensors.total && added == tensors.total, "%lld and %lld of %lld",
         static_cast<long long>(offset), static_cast<long long>(added),
         static_cast<long long>(tensors.total));
  EXPECT(buffer.is_surrounded(), "bytes outside of the buffer were written");

  int64_t position = 0;
  int64_t nonfinite = 0;
  for (size_t i = 0; i < tensors.data.size(); ++i) {
    for (int64_t j = 0; j < tensors.numels[i]; ++j, ++position) {
      const auto size = bytes_of(tensors.dtypes[i]);
      const To want = expected<To>(tensors.data[i] + j * size, tensors.dtypes[i], scale);
      EXPECT(same(want, buffer.data[position]), "tensor %zu of dtype %d, element %lld: %g, not %g",
             i, static_cast<int>(tensors.dtypes[i]), static_cast<long long>(j),
             static_cast<double>(buffer.data[position]), static_cast<double>(want));
      nonfinite += std::isfinite(static_cast<double>(want)) ? 0 : 1;
    }
  }
  EXPECT(nonfinite == nonfinite_count, "%lld, not %lld", static_cast<long long>(nonfinite_count),
         static_cast<long long>(nonfinite));
}

// Exactly the elements that are not finite, wherever they lie; what lies around them is all NaN.
template <int kCapacity>
void check_count_nonfinite(int count, int dtype) {
  const auto tensors = random_tensors(count, dtype);
  int64_t nonfinite = 0;
  for (size_t i = 0; i < tensors.data.size(); ++i) {
    std::memset(tensors.memory[i]->begin(), 0xff, tensors.memory[i]->size());
    visit(tensors.dtypes[i], [&](auto tag) {
      using T = decltype(tag);
      auto* values = reinterpret_cast<T*>(tensors.data[i]);
      for (int64_t j = 0; j < tensors.numels[i]; ++j) {
        write_value(values + j, tensors.dtypes[i], random_value());
        nonfinite += std::isfinite(static_cast<double>(values[j])) ? 0 : 1;
      }
    });
  }
  const int warps = 1 + static_cast<int>(below(9000));
  const auto segments = tensors.segments<const void>();
  TensorTable<const void, kCapacity> table;
  int64_t counted = 0;
  for (size_t first = 0; first < segments.size();) {
    first +=
        static_cast<size_t>(fill_table(table, segments.data() + first, segments.size() - first));
    launch(table.total, warps,
           [&](Run run, int lane) { counted += count_nonfinite_of_run(table, run, lane); });
  }
  EXPECT(counted == nonfinite, "%lld, not %lld", static_cast<long long>(counted),
         static_cast<long long>(nonfinite));
}

template <typename From, int kCapacity>
void check_unflatten(int count, int dtype) {
  const auto tensors = random_tensors(count, dtype);
  for (const auto& memory : tensors.memory) {
    std::memset(memory->begin(), 0x5a, memory->size());
  }
  const double scale = kScales[below(4)];
  const int warps = 1 + static_cast<int>(below(9000));
  const Buffer<From> buffer(tensors.total);
  for (int64_t i = 0; i < tensors.total; ++i) {
    write_value(buffer.data + i, kDtypeOf<From>, random_value());
  }
  const auto segments = tensors.segments<void>();
  TensorTable<void, kCapacity> table;
  int64_t offset = 0;
  for (size_t first = 0; first < segments.size();) {
    first +=
        static_cast<size_t>(fill_table(table, segments.data() + first, segments.size() - first));
    launch(table.total, warps, [&](Run run, int lane) {
      unflatten_run(table, buffer.data + offset, scale, run, lane);
    });
    offset += table.total;
  }
  int64_t position = 0;
  for (size_t i = 0; i < tensors.data.size(); ++i) {
    visit(tensors.dtypes[i], [&](auto tag) {
      using To = decltype(tag);
      const auto* values = reinterpret_cast<const To*>(tensors.data[i]);
      for (int64_t j = 0; j < tensors.numels[i]; ++j, ++position) {
        const To want = expected<To>(buffer.data + position, kDtypeOf<From>, scale);
        EXPECT(same(want, values[j]), "tensor %zu, element %lld: %g, not %g", i,
               static_cast<long long>(j), static_cast<double>(values[j]),
               static_cast<double>(want));
      }
      const auto* begin = static_cast<const char*>(tensors.memory[i]->begin());
      const auto* end = begin + tensors.memory[i]->size();
      const auto clean = [](char c) { return c == 0x5a; };
      EXPECT(std::all_of(begin, reinterpret_cast<const char*>(values), clean) &&
                 std::all_of(reinterpret_cast<const char*>(values + tensors.numels[i]), end, clean),
             "bytes outside of tensor %zu were written", i);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  generator.seed(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0);
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 10;
  for (int round = 0; round < rounds; ++round) {
    for (int dtype = -1; dtype < 4; ++dtype) {  // of the tensors; -1: mixed
      const int count = 1 + static_cast<int>(below(60));
      check_flatten<double, 16>(count, dtype);
      check_flatten<float, 216>(count, dtype);
      check_flatten<c10::Half, 16>(count, dtype);
      check_flatten<c10::BFloat16, 16>(count, dtype);
      check_count_nonfinite<16>(count, dtype);
      check_count_nonfinite<216>(count, dtype);
      check_unflatten<double, 16>(count, dtype);
      check_unflatten<float, 216>(count, dtype);
      check_unflatten<c10::Half, 16>(count, dtype);
      check_unflatten<c10::BFloat16, 16>(count, dtype);
    }
  }
  std::printf("passed\n");
}
