// The torch release that this is compiled against.
#pragma once

#include <torch/version.h>

#define COMMHOOK_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
