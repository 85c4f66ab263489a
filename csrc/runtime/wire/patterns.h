// Who sends what to whom in a collective. Each function adds its rounds to an operation.
//
// Up to kFewRanks ranks send each other messages directly. Of more ranks, each is connected to few
// others. Sums have the same bits on all ranks: each is made once, or everywhere in the same order.
//
// Tensors are contiguous and have one dimension. Parts are as many as there are ranks.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "runtime/wire/operation.h"

namespace commhook::wire {

constexpr int kFewRanks = 16;

// How elements are put together.
class Reduction {
 public:
  // Errors: an operation that the dtype does not have.
  Reduction(const c10d::ReduceOp& op, at::ScalarType dtype, int ranks);
  [[nodiscard]] const char* name() const;

  // result = first op second; it may be one of them.
  void reduce(at::Tensor result, const at::Tensor& first, const at::Tensor& second) const;
  // All rows, in this order. Changes row 0, unless `own` is 0. `result` may be the row `own`.
  void reduce_rows(const at::Tensor& result, const Tensors& rows, size_t own) const;
  // Sums of a matrix's rows in float32 and in their order, rounded once, of the dtypes that have
  // it.
  [[nodiscard]] bool adds_rows(const at::Tensor& result) const;
  void add_rows(const at::Tensor& result, const at::Tensor& rows) const;
  // What follows the last sum.
  void end(at::Tensor result) const;

 private:
  const c10d::ReduceOp::RedOpType op_;
  const bool is_integral_;
  const int ranks_;
};

// Parts of a tensor that differ by one element at most.
Tensors shards_of(const at::Tensor& tensor, int count);

// The stages of each are below twice the number of ranks, or 64.
void add_all_gather(Operation& operation, const Tensors& parts);
void add_all_reduce(Operation& operation, const at::Tensor& tensor, const Reduction& reduction);
void add_reduce_scatter(Operation& operation, const Tensors& parts, const at::Tensor& result,
                        const Reduction& reduction);
void add_reduce(Operation& operation, const at::Tensor& tensor, int root,
                const Reduction& reduction);
void add_broadcast(Operation& operation, const at::Tensor& tensor, int root);
// parts: those of the root, which keeps its own one; no others on other ranks.
void add_gather(Operation& operation, const at::Tensor& own, const Tensors& parts, int root);
void add_scatter(Operation& operation, const at::Tensor& own, const Tensors& parts, int root);
void add_all_to_all(Operation& operation, const Tensors& sent, const Tensors& received);
void add_barrier(Operation& operation);

}  // namespace commhook::wire
