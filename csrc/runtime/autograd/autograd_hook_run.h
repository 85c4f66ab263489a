#pragma once

#include "runtime/autograd/autograd_hook.h"

namespace commhook {

// Runs hooks, of which there are some and which the caller holds, one after another: each on what
// the one before has made of the values. Takes the GIL for those in Python only. Throws TypeError
// or RuntimeError for results that do not fit.
variable_list run_autograd_hooks(const HookList::Snapshot& hooks, HookKind kind,
                                 variable_list values, const variable_list& others);

// The same for the kinds of hook that get one value.
at::Tensor run_autograd_hooks(const HookList::Snapshot& hooks, HookKind kind,
                              const at::Tensor& value);

}  // namespace commhook
