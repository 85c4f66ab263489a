// Options of a C++ hook, given in Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "commhook/options.h"

namespace commhook {

// A hook's name. Throws ValueError for what has no form in UTF-8.
std::string checked_name(const pybind11::str& name);

// The values of all options, in their order: those in `given`, and defaults. Throws TypeError for
// an unknown or missing option and for another type, ValueError for a value that breaks a rule.
// `where` begins the message. Needs the GIL.
std::vector<OptionValue> option_values(const std::string& where,
                                       const std::vector<OptionSpec>& options,
                                       const pybind11::dict& given);

// The other way round.
pybind11::dict named_values(const std::vector<OptionSpec>& options,
                            const std::vector<OptionValue>& values);

// "dtype=torch.bfloat16, level=3", as Python writes it.
std::string describe(const std::vector<OptionSpec>& options,
                     const std::vector<OptionValue>& values);

}  // namespace commhook
