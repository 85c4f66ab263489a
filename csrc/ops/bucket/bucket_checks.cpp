#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "ops/autograd_checks.h"
#include "ops/bucket/bucket.h"
#include "ops/memory_check.h"
#include "ops/memory_overlap.h"
#include "ops/type_names.h"

namespace commhook {
namespace {

constexpr const char* kDtypes = "float64, float32, float16 or bfloat16";

void check_dense(const char* op, const char* argument, int64_t index, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), op, ": ", argument_name(argument, index),
              " must be a tensor, got None");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, op, ": ", argument_name(argument, index),
                   " must be dense (torch.strided), got layout ", tensor.layout());
  TORCH_CHECK_TYPE(is_bucket_dtype(tensor.scalar_type()), op, ": ", argument_name(argument, index),
                   " must be of dtype ", kDtypes, ", got ", dtype_name(tensor.scalar_type()));
}

}  // namespace

int64_t total_numel(at::TensorList tensors) {
  int64_t total = 0;
  for (const auto& tensor : tensors) {
    total += tensor.numel();
  }
  return total;
}

void check_buffer_dtype(const char* op, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_TYPE(!dtype.has_value() || is_bucket_dtype(*dtype), op, ": dtype must be ", kDtypes,
                   ", got ", dtype_name(*dtype));
}

at::ScalarType check_flatten(const char* op, at::TensorList tensors,
                             std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_VALUE(!tensors.empty(), op, ": tensors must hold at least one tensor, got none");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    check_dense(op, "tensors", index, tensors[i]);
    check_memory(op, "tensors", index, tensors[i]);
    TORCH_CHECK_VALUE(tensors[i].device() == tensors[0].device(), op, ": tensors[", i,
                      "] must be on the device of tensors[0], ", tensors[0].device(), ", got ",
                      tensors[i].device());
  }
  if (dtype.has_value()) {
    check_buffer_dtype(op, dtype);
    return *dtype;
  }
  for (size_t i = 1; i < tensors.size(); ++i) {
    TORCH_CHECK_TYPE(tensors[i].scalar_type() == tensors[0].scalar_type(), op,
                     ": dtype must be given if the tensors have different dtypes, got none for "
                     "tensors[0] of ",
                     dtype_name(tensors[0].scalar_type()), " and tensors[", i, "] of ",
                     dtype_name(tensors[i].scalar_type()));
  }
  return tensors[0].scalar_type();
}

void check_flatten_out(const char* op, at::TensorList tensors, const at::Tensor& out) {
  check_dense(op, "out", -1, out);
  check_memory(op, "out", -1, out);
  TORCH_CHECK_VALUE(out.is_contiguous(), op, ": out must be contiguous, got sizes ", out.sizes(),
                    " with strides ", out.strides());
  const Extent destination = extent_of(out, -1);
  int64_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    check_dense(op, "tensors", index, tensors[i]);
    check_memory(op, "tensors", index, tensors[i]);
    TORCH_CHECK_VALUE(tensors[i].device() == out.device(), op, ": tensors[", i,
                      "] must be on the device of out, ", out.device(), ", got ",
                      tensors[i].device());
    TORCH_CHECK_VALUE(!overlap(destination, extent_of(tensors[i], index)), op,
                      ": out must share no memory with the tensors, got one that overlaps tensors[",
                      i, "]");
    total += tensors[i].numel();
  }
  TORCH_CHECK_VALUE(out.numel() == total, op, ": out must hold ", total,
                    " elements, as many as the tensors, got ", out.numel());
}

void check_unflatten(const char* op, const at::Tensor& buffer, at::TensorList tensors,
                     const char* argument) {
  check_dense(op, "buffer", -1, buffer);
  check_memory(op, "buffer", -1, buffer);
  TORCH_CHECK_VALUE(buffer.is_contiguous(), op, ": buffer must be contiguous, got sizes ",
                    buffer.sizes(), " with strides ", buffer.strides());
  int64_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_dense(op, argument, static_cast<int64_t>(i), tensors[i]);
    TORCH_CHECK_VALUE(tensors[i].device() == buffer.device(), op, ": ", argument, "[", i,
                      "] must be on the device of buffer, ", buffer.device(), ", got ",
                      tensors[i].device());
    total += tensors[i].numel();
  }
  TORCH_CHECK_VALUE(buffer.numel() == total, op, ": buffer must hold ", total,
                    " elements, as many as ", argument, ", got ", buffer.numel());
}

void check_destinations(const char* op, const at::Tensor& source, const char* source_name,
                        at::TensorList tensors) {
  const Extent read = extent_of(source, -1);
  std::vector<Extent> extents;
  extents.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    const auto index = static_cast<int64_t>(i);
    check_memory(op, "tensors", index, tensor);
    extents.push_back(extent_of(tensor, index));
    TORCH_CHECK_VALUE(!overlap(read, extents.back()), op, ": tensors[", i,
                      "] must share no memory with ", source_name, ", got one that overlaps it");
    TORCH_CHECK_VALUE(!overlaps_itself(tensor), op, ": tensors[", i,
                      "] must reach each of its elements once, got sizes ", tensor.sizes(),
                      " with strides ", tensor.strides());
  }
  const auto pair = find_overlap(tensors, std::move(extents));
  TORCH_CHECK_VALUE(!pair, op, ": tensors must share no memory with each other, got tensors[",
                    pair->second, "] and tensors[", pair->first, "] that overlap");
}

void check_unflatten_into(const char* op, const at::Tensor& buffer, at::TensorList tensors) {
  check_unflatten(op, buffer, tensors, "tensors");
  check_destinations(op, buffer, "buffer", tensors);
}

}  // namespace commhook
