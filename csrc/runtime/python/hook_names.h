// The names of hooks, buckets and Python values in errors.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>

namespace commhook {

// "package.module.function"; for partials, bound methods and callable objects, the name of the
// object inside. Never throws. Needs the GIL.
std::string hook_name(const pybind11::handle& hook);

// For example "bucket 1 of 4".
std::string bucket_name(int64_t index, int64_t count);

// "hook 'package.module.function' on bucket 1 of 4", the beginning of every error of a hook.
std::string hook_on_bucket(const std::string& hook, int64_t index, int64_t count);

// "None", or the qualified name of a value's type. Needs the GIL.
std::string type_name(const pybind11::handle& value);

}  // namespace commhook
