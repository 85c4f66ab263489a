// Calling operators of this library from C++, through the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace commhook {

// The operator of that name and signature. To be kept in a static variable: finding it is slow.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Signature>();
}

}  // namespace commhook
