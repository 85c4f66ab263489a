// Shared by the codecs in plain ATen.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "ops/codecs/codec_checks.h"
#include "ops/codecs/error_math.h"

namespace commhook::codecs::reference {

// Concatenates the tensors: one-dimensional, float32.
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

// The upper halves of float32 numbers, rounded as in error_math.h. key: the key of the random
// numbers, for places from the first on; none rounds to the nearest.
inline at::Tensor narrowed(const at::Tensor& values, std::optional<uint32_t> key) {
  constexpr int64_t kWord = 0xffffffff;
  const auto bits = values.contiguous().view(at::kInt).to(at::kLong).bitwise_and(kWord);
  const auto sign = bits.bitwise_and(~static_cast<int64_t>(kAbsolute));
  const auto shifted = [](const at::Tensor& words, int64_t by) {
    return words.bitwise_right_shift(at::full_like(words, by));
  };
  at::Tensor addend;
  if (key.has_value()) {
    // A product of 32-bit words modulo 2^32, computed in halves that do not overflow.
    const auto times = [&](const at::Tensor& words, int64_t factor) {
      const auto high = (shifted(words, 16) * factor).bitwise_and(0xffff) * 0x10000;
      return (words.bitwise_and(0xffff) * factor + high).bitwise_and(kWord);
    };
    auto noise = (at::arange(values.numel(), bits.options()) + static_cast<int64_t>(*key))
                     .bitwise_and(kWord)
                     .view(values.sizes());
    noise = noise.bitwise_xor(shifted(noise, 16));
    noise = times(noise, 0x7feb352d);
    noise = noise.bitwise_xor(shifted(noise, 15));
    noise = times(noise, 0x846ca68b);
    addend = shifted(noise.bitwise_xor(shifted(noise, 16)), 16);
  } else {
    addend = shifted(bits, 16).bitwise_and(1) + 0x7fff;
  }
  const auto magnitude = (bits.bitwise_and(kAbsolute) + addend).clamp_max(0x7f7fffff);
  const auto halves = shifted(magnitude.bitwise_or(sign), 16);
  return (halves - halves.ge(0x8000).to(at::kLong) * 0x10000).to(at::kShort).view(at::kBFloat16);
}

// Writes the new error into an error, or a part of one, of the same shape.
inline void keep(const at::Tensor& lost, const at::Tensor& error,
                 std::optional<uint32_t> key = std::nullopt) {
  error.copy_(error.scalar_type() == at::kFloat ? lost : narrowed(lost, key));
}

inline Rounding rounding_on_host(const std::optional<at::Tensor>& rounding) {
  return rounding_of(is_there(rounding) ? std::optional(rounding->to(at::kCPU)) : std::nullopt);
}

// The key of the random numbers that round an error; none rounds to the nearest.
inline std::optional<uint32_t> key_of(const std::optional<at::Tensor>& rounding) {
  const auto drawn = rounding_on_host(rounding);
  return drawn.is_random ? std::optional(noise_key(drawn.seed0, drawn.seed1, drawn.step))
                         : std::nullopt;
}

}  // namespace commhook::codecs::reference
