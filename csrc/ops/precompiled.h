// The PyTorch headers of most operators, parsed once (see build_support.py). No file relies on it:
// each includes the headers that it needs.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>
