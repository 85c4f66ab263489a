// Calls a Python communication hook.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <utility>

namespace commhook {

// Runs hook(state, bucket) and returns a torch.futures.Future. A tensor becomes a completed Future.
// Any other type is a TypeError. The hook's exceptions pass through with a note that names hook and
// bucket, which the TypeError names too. Needs the GIL.
pybind11::object run_hook(const pybind11::object& hook, const pybind11::object& state,
                          const pybind11::object& bucket);

// Runs hook.average(bucket) of a hook of this library, and returns its result. Exceptions as above.
pybind11::object run_average(const pybind11::object& hook, const pybind11::object& bucket);

// A bucket's index and the number of buckets, of our GradBucket or PyTorch's. Needs the GIL.
std::pair<int64_t, int64_t> index_and_count(const pybind11::object& bucket);

// Converts a hook's return value to a Future. `where` names hook and bucket for errors. Needs the
// GIL.
pybind11::object as_future(const pybind11::object& returned, const std::string& where);

// Raises an error for mistakes that can be found before training starts. Needs the GIL.
void check_hook(const pybind11::object& hook);

}  // namespace commhook
