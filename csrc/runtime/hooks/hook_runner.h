// Calls a Python communication hook.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <utility>

namespace commhook {

// hook(state, bucket) as a torch.futures.Future. A tensor becomes a completed Future; an exception
// of the hook passes through as it is, with a note that names hook and bucket; anything else is a
// TypeError that does. Needs the GIL.
pybind11::object run_hook(const pybind11::object& hook, const pybind11::object& state,
                          const pybind11::object& bucket);

// hook.average(bucket) of a hook of this library, whatever it returns. Exceptions as above.
pybind11::object run_average(const pybind11::object& hook, const pybind11::object& bucket);

// A bucket's index and the number of buckets, of our GradBucket or PyTorch's. Needs the GIL.
std::pair<int64_t, int64_t> index_and_count(const pybind11::object& bucket);

// What a hook returned, as a Future. `where` names hook and bucket for the error. Needs the GIL.
pybind11::object as_future(const pybind11::object& returned, const std::string& where);

// Raises what a user must know before training starts. Needs the GIL.
void check_hook(const pybind11::object& hook);

}  // namespace commhook
