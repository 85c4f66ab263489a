// What codecs in plain ATen begin with.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "ops/codecs/codec_checks.h"

namespace commhook::codecs::reference {

// One-dimensional, float32.
inline at::Tensor flat_of(at::TensorList tensors) {
  std::vector<at::Tensor> pieces;
  pieces.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    pieces.push_back(tensor.detach().reshape(-1).to(at::kFloat));
  }
  return at::cat(pieces);
}

inline at::Tensor compensated(const at::Tensor& flat, double scale,
                              const std::optional<at::Tensor>& error) {
  const auto factor = static_cast<double>(static_cast<float>(scale));
  const auto scaled = factor == 1.0 ? flat : flat * factor;
  return is_there(error) ? scaled + error->detach().view(-1) : scaled;
}

inline Rounding rounding_on_host(const std::optional<at::Tensor>& rounding) {
  return rounding_of(is_there(rounding) ? std::optional(rounding->to(at::kCPU)) : std::nullopt);
}

}  // namespace commhook::codecs::reference
