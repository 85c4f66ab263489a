// From what a communication hook gave back to the tensor that goes into the gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>

namespace commhook {

// What a bucket's result must be like, and how errors name it.
struct BucketSpec {
  std::string hook;  // may be empty
  int64_t index;
  int64_t count;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  at::Device device;
  at::Layout layout;

  BucketSpec(std::string hook, int64_t index, int64_t count, const at::Tensor& buffer);
  // "hook 'f' on bucket 1 of 4", or "bucket 1 of 4".
  std::string name() const;
};

// Checks length, dtype, device and layout, and returns the result as a contiguous tensor of the
// buffer's shape. Throws TypeError or ValueError. No GIL needed.
at::Tensor check_result(const at::Tensor& result, const BucketSpec& spec);

// A Future's value as a checked tensor: a tensor, a list or tuple of one tensor, or an exception
// (which torch.futures.Future.set_exception stores as a value), which is raised with its type and
// traceback. Takes the GIL where the value is Python's.
at::Tensor parse_result(const c10::IValue& value, const BucketSpec& spec);
at::Tensor parse_result(const pybind11::object& value, const BucketSpec& spec);

}  // namespace commhook
