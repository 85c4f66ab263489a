#pragma once

#include "runtime/autograd/autograd_hook.h"

namespace commhook {

// Runs hooks in order, each on the values that the hook before it returned. The snapshot is not
// null, and the caller keeps it. Takes the GIL only for Python hooks. Throws TypeError or
// RuntimeError for a result that does not fit.
variable_list run_autograd_hooks(const HookList::Snapshot& hooks, HookKind kind,
                                 variable_list values, const variable_list& others);

// The same for the kinds of hook that receive one value.
at::Tensor run_autograd_hooks(const HookList::Snapshot& hooks, HookKind kind,
                              const at::Tensor& value);

}  // namespace commhook
