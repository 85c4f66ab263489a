// The libraries of C++ hooks that this process has loaded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "commhook/registry.h"

namespace commhook {

// Loads a shared library, for as long as the process lives. Throws ImportError where it does not
// load. Its static initialisers run.
void open_hook_library(const std::string& path);

// Takes in the hooks of one that has been opened. Returns their names, those of communication hooks
// first; the same when it is called again. Throws ImportError where the library was built with
// other headers or another torch, ValueError where it has no hooks or one of a name that is taken.
// Both need no GIL.
std::vector<std::string> take_hook_library(const std::string& path);

// Throw ValueError, with the names that there are.
const CommHookSpec& find_comm_hook(const std::string& name);
const AutogradHookSpec& find_autograd_hook(const std::string& name);

}  // namespace commhook
