// The libraries of C++ hooks in this process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "commhook/registry.h"

namespace commhook {

// Loads a shared library for the life of the process, and runs its static initialisers. Throws
// ImportError if that fails.
void open_hook_library(const std::string& path);

// Registers the hooks of an open library. Returns their names, communication hooks first; a second
// call returns the same. Throws ImportError if the library was built with other headers or another
// torch, and ValueError if it has no hooks or a name is taken. Neither function needs the GIL.
std::vector<std::string> take_hook_library(const std::string& path);

// Throw ValueError for an unknown name; the message lists the known names.
const CommHookSpec& find_comm_hook(const std::string& name);
const AutogradHookSpec& find_autograd_hook(const std::string& name);

}  // namespace commhook
