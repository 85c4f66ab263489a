// Codecs that send values in blocks: 1, 2, 4 or 8 bits for each value and a few float32 parameters
// for each block. This file checks their operators' arguments.
//
// - A message has shards, which are cut at the borders of blocks. Or there is one message for each
//   of several chunks, which end where the caller says (block_chunks.h), as FSDP's chunks do.
// - A shard holds the codes of its blocks, then their parameters. Zeros pad both to multiples of 16
//   bytes (block_layout.h). So each shard, chunk and message begins at such a multiple, and loads
//   and stores of 16 bytes are aligned, on the CPU and on CUDA.
// - An operator has one implementation for all devices. It checks its arguments and chooses the CPU
//   kernels or plain ATen.
// - csrc/ops/cpu/blocks.h reads and writes a bucket in blocks, in place and across the tensors'
//   borders. A codec's kernels get a run of blocks at a time, which stays in the first-level cache.
// - The kernels are plain loops that compilers vectorise, in a file that
//   csrc/ops/cpu/for_each_instruction_set.h compiles three times.
// - With AVX-512, intrinsics quantise plain blocks of 64, 128 or 256 values. While a run of 256
//   values is quantised, the extremes of the next run become steps, and the run after that is
//   measured. This keeps memory busy without prefetching. fp8 also uses intrinsics, and measures
//   256 values before it quantises them.
// - Both decode with non-temporal stores: whole blocks of a multiple of 32 values, to addresses at
//   which a cache line begins. Outputs that are large compared with the last-level cache are stored
//   in the same way (csrc/ops/cpu/streaming.h).
// - A header for host and device holds the arithmetic. No multiply-add is fused (setup.py), so the
//   reference, all instruction sets and any number of threads give the same bits. Random numbers
//   are Philox4x32-10 of seed, step, block and position in the block.
#pragma once

#include <ATen/ATen.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <optional>

#include "ops/codecs/block_chunks.h"
#include "ops/codecs/block_layout.h"
#include "ops/codecs/codec_checks.h"
#include "ops/symmetric/symmetric.h"

namespace commhook::codecs {

// Each throws an error that names the operator, the argument, its contract and the value.

// block_size: a multiple of `multiple`, at most kMaxBlockSize.
void check_block_size(const char* op, int64_t block_size, int64_t multiple);

// tensors: as flatten takes them. message: contiguous, with the bytes of all chunks. sizes: the
// elements of each chunk, as many in all as the tensors have; none means a single chunk of `shards`
// shards. error: flat float32 or bfloat16 with the tensors' number of elements, or none. rounding:
// two int64, seed and step; none rounds to the nearest. All are on one device and share no memory.
C10_EXPORT Chunks check_encode(const char* op, at::TensorList tensors, const at::Tensor& message,
                               const BlockForm& form, int64_t shards, at::OptionalIntArrayRef sizes,
                               const std::optional<at::Tensor>& error,
                               const std::optional<at::Tensor>& rounding);
// tensors: as unflatten_into takes them.
C10_EXPORT Chunks check_decode(const char* op, const at::Tensor& message, at::TensorList tensors,
                               const BlockForm& form, int64_t shards,
                               at::OptionalIntArrayRef sizes);
// messages: [messages, bytes of the tensors' values in one shard].
C10_EXPORT BlockLayout check_decode_sum(const char* op, const at::Tensor& messages,
                                        at::TensorList tensors, const BlockForm& form);
// messages: [messages, bytes of `numel` values in one shard]. message: one row of that.
C10_EXPORT BlockLayout check_reduce(const char* op, const at::Tensor& messages,
                                    const at::Tensor& message, const BlockForm& form, int64_t numel,
                                    const std::optional<at::Tensor>& error,
                                    const std::optional<at::Tensor>& rounding);
// messages: one tensor for each rank, 1 to kMaxRanks of them, each with the bytes of `numel` values
// in one shard. message: the same for one. failed: see check_failed.
C10_EXPORT BlockLayout check_reduce_shards(const char* op, at::TensorList messages,
                                           const at::Tensor& message, const BlockForm& form,
                                           int64_t numel, const std::optional<at::Tensor>& error,
                                           const std::optional<at::Tensor>& rounding,
                                           const std::optional<at::Tensor>& failed);

}  // namespace commhook::codecs
