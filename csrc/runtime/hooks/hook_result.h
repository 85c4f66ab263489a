// From what a communication hook gave back to the tensor that goes into the gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>
#include <vector>

#include "commhook/grad_bucket.h"

namespace commhook {

// What a bucket's result must be like.
struct ResultSpec {
  std::string where;  // begins every error: "hook 'f' on bucket 1 of 4", say
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  at::Device device;
  at::Layout layout;

  ResultSpec(std::string where, const at::Tensor& buffer);
  ResultSpec(std::string where, GradBucket& bucket);
};

// Whether two tensors are the same elements of memory: collectives work in place, and backends
// differ in whether they give back the same tensor object.
bool is_same_memory(const at::Tensor& a, const at::Tensor& b);

// Checks length, dtype, device and layout, and returns the result as a contiguous tensor of the
// buffer's shape. Throws TypeError or ValueError. No GIL needed.
at::Tensor check_result(const at::Tensor& result, const ResultSpec& spec);

// The tensor in a completed Future's value: a tensor, a list or tuple of one tensor, or an
// exception (which torch.futures.Future.set_exception stores as a value), which is raised with its
// type and traceback. `where` begins the message of every other error. The first needs the GIL, the
// second takes it where the value is Python's; what it throws can then be held without it.
at::Tensor tensor_in(const pybind11::object& value, const std::string& where);
at::Tensor tensor_in(const c10::IValue& value, const std::string& where);

// An exception as Python would get it. Needs the GIL.
pybind11::object python_exception(const std::exception_ptr& error);

// A Python exception in a form that any thread may hold, copy and drop without the GIL. Needs the
// GIL.
std::exception_ptr persistent(pybind11::error_already_set& error);

}  // namespace commhook
