// Options of a C++ hook that Python passes.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "commhook/options.h"

namespace commhook {

// A hook's name. Throws ValueError if UTF-8 cannot encode it.
std::string checked_name(const pybind11::str& name);

// The values of all options in their order, from `given` or the defaults. Throws TypeError for an
// unknown or missing option or a wrong type, and ValueError for a value that breaks a rule.
// Messages begin with `where`. Needs the GIL.
std::vector<OptionValue> option_values(const std::string& where,
                                       const std::vector<OptionSpec>& options,
                                       const pybind11::dict& given);

// The inverse.
pybind11::dict named_values(const std::vector<OptionSpec>& options,
                            const std::vector<OptionValue>& values);

// For example "dtype=torch.bfloat16, level=3", as Python writes it.
std::string describe(const std::vector<OptionSpec>& options,
                     const std::vector<OptionValue>& values);

}  // namespace commhook
