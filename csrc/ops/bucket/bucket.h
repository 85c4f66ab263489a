// Shared by the bucket operators' kernels: the checks of their arguments, and the reference
// kernels. The checks, here and in codecs, are exported because the kernels of a separate library
// call them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <optional>
#include <tuple>
#include <vector>

#include "ops/bucket/bucket_dtype.h"

namespace commhook {

// The dtype in which values are scaled when they change from one dtype to another.
inline at::ScalarType scaling_dtype(at::ScalarType from, at::ScalarType to) {
  return from == at::kDouble || to == at::kDouble ? at::kDouble : at::kFloat;
}

// Sum of the tensors' elements.
C10_EXPORT int64_t total_numel(at::TensorList tensors);

// Each check throws an error that names the operator, the argument, its contract and the value.

// dtype: none, or a bucket dtype.
void check_buffer_dtype(const char* op, std::optional<at::ScalarType> dtype);
// tensors: dense, of a bucket dtype, all on one device. Returns the buffer's dtype: `dtype`, or the
// tensors' own.
C10_EXPORT at::ScalarType check_flatten(const char* op, at::TensorList tensors,
                                        std::optional<at::ScalarType> dtype);
// Beyond check_flatten: out is contiguous, of a bucket dtype, of the tensors' device and total
// length, and shares no memory with them.
C10_EXPORT void check_flatten_out(const char* op, at::TensorList tensors, const at::Tensor& out);
// buffer: dense, contiguous, of a bucket dtype; tensors (named `argument`): dense, of bucket
// dtypes, on the buffer's device, and of its length in total.
C10_EXPORT void check_unflatten(const char* op, const at::Tensor& buffer, at::TensorList tensors,
                                const char* argument);
// Checks tensors that will be written: they reach no element twice, and share none with the source.
void check_destinations(const char* op, const at::Tensor& source, const char* source_name,
                        at::TensorList tensors);
// Both checks above.
C10_EXPORT void check_unflatten_into(const char* op, const at::Tensor& buffer,
                                     at::TensorList tensors);

// The reference kernels: plain ATen, for every device. The first two are differentiable.
namespace reference {
// Flattens and scales the tensor; the result has the dtype in which values are scaled on their way
// to `to`.
at::Tensor scaled(const at::Tensor& tensor, double scale, at::ScalarType to);
at::Tensor flatten(at::TensorList tensors, double scale, std::optional<at::ScalarType> dtype);
std::tuple<at::Tensor, at::Tensor, at::Tensor> flatten_stats(at::TensorList tensors, double scale,
                                                             std::optional<at::ScalarType> dtype);
at::Tensor& flatten_out(at::TensorList tensors, double scale, at::Tensor& out);
std::vector<at::Tensor> unflatten(const at::Tensor& buffer, at::TensorList like, double scale);
void unflatten_into(const at::Tensor& buffer, at::TensorList tensors, double scale);
}  // namespace reference

// Uninitialised tensors with the shapes, dtypes and device of `like`, and with its strides where
// `like` is dense.
C10_EXPORT std::vector<at::Tensor> empty_like(at::TensorList like);

}  // namespace commhook
