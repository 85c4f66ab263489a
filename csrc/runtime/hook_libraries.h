// The libraries of C++ hooks that this process has loaded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "commhook/registry.h"

namespace commhook {

// Loads a shared library and takes in its hooks. Returns their names, those of communication hooks
// first; the same for a library that is loaded already. Throws ImportError where it does not load
// or was built with other headers or another torch, ValueError where it has no hooks or one of a
// name that is taken. Needs no GIL; the library's static initialisers run.
std::vector<std::string> load_hook_library(const std::string& path);

// Throw ValueError, with the names that there are.
const CommHookSpec& find_comm_hook(const std::string& name);
const AutogradHookSpec& find_autograd_hook(const std::string& name);

}  // namespace commhook
