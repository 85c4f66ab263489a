// Which parameters a module and those inside it hold.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace commhook {

// A number that is another one, as good as certainly, where a module or a parameter anywhere inside
// of `model` is another object, has gone, or is new. Holds nothing of them. Needs the GIL.
uint64_t module_members(const pybind11::object& model);

}  // namespace commhook
