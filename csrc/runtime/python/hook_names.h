// How errors name hooks, buckets and Python values.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>

namespace commhook {

// "package.module.function"; for partials, bound methods and callable objects what is inside them.
// Never throws, whatever the object. Needs the GIL.
std::string hook_name(const pybind11::handle& hook);

// "bucket 1 of 4".
std::string bucket_name(int64_t index, int64_t count);

// "hook 'package.module.function' on bucket 1 of 4", what every error of a hook begins with.
std::string hook_on_bucket(const std::string& hook, int64_t index, int64_t count);

// "None", or the qualified name of a value's type. Needs the GIL.
std::string type_name(const pybind11::handle& value);

}  // namespace commhook
