// Computes p = values * scale + error in one pass, for codecs that read p more than once: flattens,
// scales, adds the error, and writes p and the new error.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "launch.cuh"
#include "ops/codecs/codec_checks.h"
#include "quad.h"
#include "rounding.cuh"
#include "row.h"
#include "sources.h"
#include "warp.cuh"

namespace commhook::cuda {

enum class ErrorKind { kNone, kFloat, kBFloat16 };

// A warp moves the values through shared memory one tile at a time. Tensors begin at any address.
// In the tile, in p and in an aligned error, four values are moved in 16 bytes.
constexpr int kTileQuads = 4;  // of a lane
constexpr int kTileValues = kTileQuads * kQuadValues * kWarpSize;
constexpr int kBlockTileQuads = kTileQuads * kThreads;

// A tile's values: quad k of a lane holds those from position (32 k + lane) * 4 of the tile on.
struct TileQuads {
  Quad quads[kTileQuads];
};

// Flat memory for `numel` values. With a float32 error, p is the error itself.
struct Compensation {
  float* p;
  uint16_t* narrow_error;   // null unless the error is bfloat16
  const int64_t* rounding;  // seed and step; null rounds the error to the nearest
  int64_t numel;
  float scale;
};

// The part of one launch: `tiles` for each warp, from value `first` on.
struct CompensationPart {
  Compensation all;
  int64_t first;
  int64_t tiles;
};

__device__ inline float finite_or_zero(float value) {
  return (bits_of(value) & kAbsolute) < kInfinity ? value : 0.0f;
}

// Four values of 16 bits at once.
struct alignas(8) NarrowQuad {
  uint16_t values[kQuadValues];
};

// The work of a warp on its tiles. kWritesP: whether later kernels read p. If p is the error, it is
// written anyway.
template <ErrorKind kKind, bool kKeepsNonfinite, bool kWritesP>
class TileWork {
  static constexpr bool kWrites = kWritesP || kKind == ErrorKind::kFloat;

 public:
  __device__ TileWork(const Compensation& all, float* tile)
      : all_(all), tile_(tile), lane_(lane_of_warp()), is_aligned_(is_aligned_for_quads(all.p)) {
    if constexpr (kKind == ErrorKind::kBFloat16) {
      round_ = narrow_rounding(all.rounding);
      is_aligned_ =
          is_aligned_ && reinterpret_cast<uintptr_t>(all.narrow_error) % sizeof(NarrowQuad) == 0;
    }
  }

  // Writes p for the tile's values at `place`, and returns it; zeros past the end.
  __device__ TileQuads compensate(int64_t place) const {
    if (is_aligned_ && place + kTileValues <= all_.numel) {
      return compensate_quads(place);
    }
    const int count = static_cast<int>(min(all_.numel - place, int64_t{kTileValues}));
#pragma unroll 1
    for (int i = lane_; i < kTileValues; i += kWarpSize) {
      tile_[i] = i < count ? compensate_one(tile_[i], place + i) : 0.0f;
    }
    __syncwarp();
    TileQuads p;
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
      p.quads[k] = quads()[k * kWarpSize + lane_];
    }
    return p;
  }

 private:
  __device__ const Quad* quads() const { return reinterpret_cast<const Quad*>(tile_); }

  __device__ float kept(float p) const {
    return kKind == ErrorKind::kFloat && !kKeepsNonfinite ? finite_or_zero(p) : p;
  }

  __device__ float compensate_one(float value, int64_t at) const {
    float p = value * all_.scale;
    if constexpr (kKind == ErrorKind::kFloat) {
      p = p + all_.p[at];
    }
    if constexpr (kKind == ErrorKind::kBFloat16) {
      p = p + codecs::widened(all_.narrow_error[at]);
      all_.narrow_error[at] = round_(finite_or_zero(p), at);
    }
    if constexpr (kWrites) {
      all_.p[at] = kept(p);
    }
    return p;
  }

  __device__ TileQuads compensate_quads(int64_t place) const {
    auto* const to = reinterpret_cast<Quad*>(all_.p + place);
    auto* const narrow = reinterpret_cast<NarrowQuad*>(all_.narrow_error + place);
    TileQuads p;
    TileQuads lost;
    NarrowQuad narrow_lost[kTileQuads];
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {  // all loads precede the first use
      const int own = k * kWarpSize + lane_;
      if constexpr (kKind == ErrorKind::kFloat) {
        lost.quads[k] = to[own];
      }
      if constexpr (kKind == ErrorKind::kBFloat16) {
        narrow_lost[k] = narrow[own];
      }
    }
#pragma unroll
    for (int k = 0; k < kTileQuads; ++k) {
      const int own = k * kWarpSize + lane_;
      p.quads[k] = quads()[own];
      Quad written;
#pragma unroll
      for (int i = 0; i < kQuadValues; ++i) {
        float& value = p.quads[k].values[i];
        value = value * all_.scale;
        if constexpr (kKind == ErrorKind::kFloat) {
          value = value + lost.quads[k].values[i];
        }
        if constexpr (kKind == ErrorKind::kBFloat16) {
          auto& each = narrow_lost[k].values[i];
          value = value + codecs::widened(each);
          each = round_(finite_or_zero(value), place + own * kQuadValues + i);
        }
        written.values[i] = kept(value);
      }
      if constexpr (kWrites) {
        to[own] = written;
      }
      if constexpr (kKind == ErrorKind::kBFloat16) {
        narrow[own] = narrow_lost[k];
      }
    }
    return p;
  }

  const Compensation& all_;
  float* tile_;
  int lane_;
  bool is_aligned_;
  NarrowRounding round_{};
};

// Calls visit(place, p) for each tile of this warp. tiles: shared memory, kBlockTileQuads.
template <ErrorKind kKind, bool kKeepsNonfinite, bool kWritesP = true, typename Table,
          typename Visit>
__device__ void for_each_compensated_tile(const Table& table, const CompensationPart& part,
                                          Quad* tiles, const Visit& visit) {
  const int lane = lane_of_warp();
  const int warp = warp_of_block();
  const int64_t begin = (int64_t{blockIdx.x} * kWarpsPerBlock + warp) * part.tiles * kTileValues;
  const int64_t end = min(table.total, begin + part.tiles * kTileValues);
  if (begin >= end) {
    return;
  }
  auto* const tile = reinterpret_cast<float*>(tiles + warp * kTileQuads * kWarpSize);
  const TileWork<kKind, kKeepsNonfinite, kWritesP> work(part.all, tile);
  Cursor cursor = cursor_at(table, begin);
  NoMeasure meter;
  for (int64_t first = begin; first < end; first += kTileValues) {
    flatten_run(table, tile - first, 1.0, Run{first, min(end, first + kTileValues)}, cursor, lane,
                meter);
    __syncwarp();
    visit(part.first + first, work.compensate(part.first + first));
    __syncwarp();  // before the tile is overwritten
  }
}

// ---- host --------------------------------------------------------------------------------------

// The memory of one encoding: the error of any kind, and p.
class CompensatedMemory {
 public:
  // error, rounding: checked, or none. p is the error if that is float32. Otherwise p is a separate
  // tensor, or none if it need not be written.
  CompensatedMemory(const char* op, int64_t numel, double scale,
                    const std::optional<at::Tensor>& error,
                    const std::optional<at::Tensor>& rounding, const at::TensorOptions& options,
                    bool writes_p = true) {
    work_ = {nullptr, nullptr, numbers_of(op, "rounding", rounding), numel,
             static_cast<float>(scale)};
    if (codecs::is_there(error)) {
      check_aligned(op, "error", -1, *error);
      if (error->scalar_type() == at::kFloat) {
        kind_ = ErrorKind::kFloat;
        work_.p = error->mutable_data_ptr<float>();
        return;
      }
      kind_ = ErrorKind::kBFloat16;
      work_.narrow_error = static_cast<uint16_t*>(error->mutable_data_ptr());
    }
    if (writes_p) {
      flat_ = at::empty({numel}, options.dtype(at::kFloat));
      work_.p = flat_.mutable_data_ptr<float>();
    }
  }

  const Compensation& work() const { return work_; }
  // Null unless the error is float32.
  float* error() const { return kind_ == ErrorKind::kFloat ? work_.p : nullptr; }

  // Calls visit(kind) with a compile-time constant.
  template <typename Visit>
  void with_kind(const Visit& visit) const {
    switch (kind_) {
      case ErrorKind::kNone:
        return visit(std::integral_constant<ErrorKind, ErrorKind::kNone>());
      case ErrorKind::kFloat:
        return visit(std::integral_constant<ErrorKind, ErrorKind::kFloat>());
      case ErrorKind::kBFloat16:
        return visit(std::integral_constant<ErrorKind, ErrorKind::kBFloat16>());
    }
  }

 private:
  Compensation work_{};
  ErrorKind kind_ = ErrorKind::kNone;
  at::Tensor flat_;
};

inline int64_t tiles_of(int64_t numel) { return (numel + kTileValues - 1) / kTileValues; }

// Calls launch(table, kind, first) for as few tables as possible. kind: the error's, a compile-time
// constant. first: the position of the table's first element. unit: whole tiles of values, which no
// table splits.
template <typename Launch>
void launch_compensated(const char* op, at::TensorList tensors, const CompensatedMemory& memory,
                        const Launch& launch, int64_t unit = kTileValues) {
  const Sources sources(op, tensors);
  memory.with_kind([&](auto kind) {
    with_tables(sources.segments(), unit, tensors[0].options(),
                [&](const auto& table, int64_t first) {
                  launch(table, kind, first * unit);
                  C10_CUDA_KERNEL_LAUNCH_CHECK();
                });
  });
}

// Blocks of kThreads for `count` pieces of work, one warp each: at most one wave. Each warp takes
// `each` pieces.
struct WarpGrid {
  unsigned blocks;
  int64_t each;
};

template <typename... Arguments>
WarpGrid warp_grid_of(void (*kernel)(Arguments...), int64_t count) {
  const int64_t wave = warps_of_a_wave(kernel, kThreads);
  const int64_t each = std::max<int64_t>((count + wave - 1) / wave, 1);
  const int64_t warps = (count + each - 1) / each;
  return {blocks_for(warps, kWarpsPerBlock), each};
}

}  // namespace commhook::cuda
