// Hooks of the autograd engine in C++. These functions run without the GIL. Their results are
// checked like those of hooks in Python.
//
//   commhook::TensorHook clip(double limit) {
//     return [limit](const at::Tensor& grad) { return grad.clamp(-limit, limit); };
//   }
//   COMMHOOK_REGISTER_AUTOGRAD_HOOK(clip, "clip", commhook::Option<double>("limit").above(0));
//
// In Python: autograd.register_hook(tensor, autograd.cpp("clip", limit=1.0)).
#pragma once

#include "commhook/autograd_hook_types.h"
#include "commhook/registry.h"
