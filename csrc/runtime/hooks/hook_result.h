// Checks and extracts the result of a communication hook.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>
#include <vector>

#include "commhook/grad_bucket.h"

namespace commhook {

// The required properties of a bucket's result.
struct ResultSpec {
  std::string where;  // begins every error, for example "hook 'f' on bucket 1 of 4"
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  at::Device device;
  at::Layout layout;

  ResultSpec(std::string where, const at::Tensor& buffer);
  ResultSpec(std::string where, GradBucket& bucket);
};

// Whether two tensors are the same elements of memory. Collectives work in place, and only some
// backends return the same tensor object.
bool is_same_memory(const at::Tensor& a, const at::Tensor& b);

// Checks length, dtype, device and layout, and returns the result as a contiguous tensor of the
// buffer's shape. Throws TypeError or ValueError. Does not need the GIL.
at::Tensor check_result(const at::Tensor& result, const ResultSpec& spec);

// The tensor in a completed Future's value: a tensor, or a list or tuple with one. The value may
// also be an exception (torch.futures.Future.set_exception stores it so), which is raised with its
// type and traceback. Messages of other errors begin with `where`. The first function needs the
// GIL. The second takes it for a Python value; its exceptions can be held without the GIL.
at::Tensor tensor_in(const pybind11::object& value, const std::string& where);
at::Tensor tensor_in(const c10::IValue& value, const std::string& where);

// The Python exception for a C++ exception. Needs the GIL.
pybind11::object python_exception(const std::exception_ptr& error);

// Converts a Python exception so that any thread may hold, copy and drop it without the GIL. Needs
// the GIL.
std::exception_ptr persistent(pybind11::error_already_set& error);

}  // namespace commhook
