#pragma once

#include <string>

#include "runtime/autograd/autograd_hook.h"

namespace commhook {

// An operator as a hook, called through the dispatcher without the GIL. Throws TypeError if its
// schema does not fit the kind of hook, or if the operator does not exist.
NativeHook operator_hook(const std::string& name, const std::string& overload, HookKind kind);

}  // namespace commhook
