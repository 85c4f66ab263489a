// Plays the CUDA kernels of block codecs on the host: every lane of every warp, one after the
// other. A library for test_cuda_blocks.py, which gives it the memory of CPU tensors.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#include "block_tile.h"
#include "blockwise_block.h"
#include "fp8_block.h"
#include "row.h"
#include "sign_block.h"
#include "tensor_table.h"

namespace {

using namespace commhook::cuda;

// All lanes of a warp.
struct HostWarp {
  static constexpr int kHeld = kWarpSize;

  template <typename Call>
  void each(const Call& call) const {
    for (int lane = 0; lane < kWarpSize; ++lane) {
      call(lane, lane);
    }
  }
  void sync() const {}
  template <typename Measure>
  void take_largest(Measure (&measures)[kHeld], int distance) const {
    Measure before[kHeld];
    std::copy(measures, measures + kHeld, before);
    for (int lane = 0; lane < kHeld; ++lane) {
      for (int i = 0; i < Measure::kWords; ++i) {
        measures[lane].words[i] = std::max(before[lane].words[i], before[lane ^ distance].words[i]);
      }
    }
  }
  template <int kParts>
  void add_up(float (&parts)[kHeld]) const {
    for (int distance = kParts / 2; distance > 0; distance /= 2) {
      float before[kHeld];
      std::copy(parts, parts + kHeld, before);
      for (int lane = 0; lane < kHeld; ++lane) {
        parts[lane] = before[lane] + before[lane ^ distance];
      }
    }
  }
  template <typename Source>
  void give(float (&parts)[kHeld], const Source& source) const {
    float before[kHeld];
    std::copy(parts, parts + kHeld, before);
    for (int lane = 0; lane < kHeld; ++lane) {
      parts[lane] = before[source(lane)];
    }
  }
};

// What a warp has of the shared memory, which ends at a page that may not be touched: what follows
// is another warp's. Not zeros: what a kernel does not write, it must not read.
class Shared {
 public:
  explicit Shared(int bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t size = (static_cast<size_t>(bytes) + page - 1) / page * page;
    mapped_ = size + page;
    void* const base =
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(static_cast<char*>(base) + size, page, PROT_NONE) != 0) {
      std::abort();
    }
    base_ = static_cast<char*>(base);
    begin_ = base_ + size - static_cast<size_t>(bytes);
    std::memset(begin_, 0xff, static_cast<size_t>(bytes));
  }
  Shared(const Shared&) = delete;
  ~Shared() { munmap(base_, mapped_); }
  float* values() { return reinterpret_cast<float*>(begin_); }

 private:
  char* base_;
  char* begin_;
  size_t mapped_;
};

template <typename Visit>
void for_each_tile(const BlockWork& work, const BlockTile& tile, const Visit& visit) {
  const int64_t values = values_of(tile, work.block_size);
  for (int64_t index = 0; index * values < work.numel; ++index) {
    const int64_t begin = index * values;
    visit(index * tile.blocks, Run{begin, std::min(work.numel, begin + values)});
  }
}

DitherKey key_of(const int64_t* rounding) {
  if (rounding == nullptr) {
    return {false, 0, 0, 0};
  }
  const auto seed = static_cast<uint64_t>(rounding[0]);
  return {true, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
          static_cast<uint32_t>(rounding[1])};
}

template <typename Data>
TensorTable<Data, 216> table_of(int count, Data* const* data, const int64_t* numels,
                                const int* dtypes) {
  std::vector<Segment<Data>> segments;
  for (int i = 0; i < count; ++i) {
    if (numels[i] > 0) {
      segments.push_back({data[i], numels[i], static_cast<Dtype>(dtypes[i])});
    }
  }
  TensorTable<Data, 216> table;
  fill_table(table, segments.data(), segments.size());
  return table;
}

// Calls call(codec): the names are those of the Python test.
template <typename Call>
bool with_codec(const char* name, const Call& call) {
  const auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("blockwise 8 symmetric")) {
    call(BlockwiseBlock<8, true>{});
  } else if (is("blockwise 8 min-max")) {
    call(BlockwiseBlock<8, false>{});
  } else if (is("blockwise 4 symmetric")) {
    call(BlockwiseBlock<4, true>{});
  } else if (is("blockwise 4 min-max")) {
    call(BlockwiseBlock<4, false>{});
  } else if (is("fp8 e4m3")) {
    call(Fp8Block<false>{});
  } else if (is("fp8 e5m2")) {
    call(Fp8Block<true>{});
  } else if (is("sign")) {
    call(SignBlock{});
  } else {
    return false;
  }
  return true;
}

}  // namespace

extern "C" {

struct Work {
  int64_t numel;
  int64_t shards;
  int64_t block_size;
  double scale;
};

// Each returns whether there is such a codec.

bool encode(const char* codec_name, const Work* given, int count, const void* const* data,
            const int64_t* numels, const int* dtypes, const int64_t* rounding, float* error,
            uint8_t* message) {
  return with_codec(codec_name, [&](auto codec) {
    using Codec = decltype(codec);
    const BlockWork work{given->numel, static_cast<int>(given->shards),
                         static_cast<int>(given->block_size), 1, static_cast<float>(given->scale)};
    const auto tile = tile_of<Codec>(work.block_size);
    const auto key = key_of(rounding);
    const auto table = table_of(count, data, numels, dtypes);
    for_each_tile(work, tile, [&](int64_t first, const Run& run) {
      Shared shared(shared_bytes(tile, work.block_size, key.is_random));
      HostWarp warp;
      NoMeasure meter;
      warp.each([&](int lane, int) {
        flatten_run(table, shared.values() - run.begin, 1.0, run, lane, meter);
      });
      encode_tile(warp, codec, layout_of<Codec>(work), tile, first, work.scale, key,
                  shared.values(), error, message);
    });
  });
}

bool decode(const char* codec_name, const Work* given, int count, void* const* data,
            const int64_t* numels, const int* dtypes, const uint8_t* message) {
  return with_codec(codec_name, [&](auto codec) {
    using Codec = decltype(codec);
    const BlockWork work{given->numel, static_cast<int>(given->shards),
                         static_cast<int>(given->block_size), 1, 1.0f};
    const auto tile = tile_of<Codec>(work.block_size);
    const auto table = table_of(count, data, numels, dtypes);
    for_each_tile(work, tile, [&](int64_t first, const Run& run) {
      Shared shared(shared_bytes(tile, work.block_size, false));
      HostWarp warp;
      decode_tile(warp, codec, layout_of<Codec>(work), tile, first, message, 1, shared.values());
      warp.each([&](int lane, int) {
        unflatten_run(table, shared.values() - run.begin, 1.0, run, lane);
      });
    });
  });
}

bool reduce(const char* codec_name, const Work* given, const uint8_t* messages, int64_t count,
            const int64_t* rounding, float* error, uint8_t* message) {
  return with_codec(codec_name, [&](auto codec) {
    using Codec = decltype(codec);
    const BlockWork work{given->numel, 1, static_cast<int>(given->block_size), 1,
                         static_cast<float>(given->scale)};
    const auto tile = tile_of<Codec>(work.block_size);
    const auto key = key_of(rounding);
    for_each_tile(work, tile, [&](int64_t first, const Run&) {
      Shared shared(shared_bytes(tile, work.block_size, key.is_random));
      HostWarp warp;
      decode_tile(warp, codec, layout_of<Codec>(work), tile, first, messages, count,
                  shared.values());
      encode_tile(warp, codec, layout_of<Codec>(work), tile, first, work.scale, key,
                  shared.values(), error, message);
    });
  });
}

}  // extern "C"
