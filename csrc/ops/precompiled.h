// What most operators include of PyTorch, parsed once (see build_support.py). Nothing relies on it:
// each file includes what it needs itself.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>
