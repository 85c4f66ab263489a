// The operators of a codec that sends values in blocks. All such codecs have the same five; this
// file has their schemas, and runs a codec's checks before a device's kernels.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/codecs/block_codec.h"
#include "ops/mutation.h"

namespace commhook::codecs {

// A codec describes itself with a struct that has
// - kName: the first part of its operators' names, such as "sign";
// - kSettings, Settings: its settings, as schemas write them ("int block_size") and as Types;
// - kRounds: whether it can round at random; operators that encode then take `rounding`;
// - check(op, settings...): returns the codec's format, or throws an error that names the operator;
// - form(format): the BlockForm.
template <typename... Each>
struct Types {};

using OptionalTensor = std::optional<at::Tensor>;

// Kernels has encode, decode, decode_sum, reduce and reduce_shards. They take the operator's name
// for errors, the format, and what is checked here. An operator takes an argument `rounding` if
// there is a type in Rounding.
template <typename Codec, typename Kernels, typename Settings = typename Codec::Settings,
          typename Rounding =
              std::conditional_t<Codec::kRounds, Types<const OptionalTensor&>, Types<>>>
struct BlockOperators;

template <typename Codec, typename Kernels, typename... Setting, typename... Rounding>
struct BlockOperators<Codec, Kernels, Types<Setting...>, Types<Rounding...>> {
  // sizes: one message for each run of so many values; none means one message of `shards` shards.
  static void encode(at::TensorList tensors, const at::Tensor& message, Setting... settings,
                     int64_t shards, at::OptionalIntArrayRef sizes, double scale,
                     const OptionalTensor& error, Rounding... rounding) {
    static const auto op = name("_encode");
    const auto format = Codec::check(op.c_str(), settings...);
    const auto chunks = check_encode(op.c_str(), tensors, message, Codec::form(format), shards,
                                     sizes, error, first_of(rounding...));
    Kernels::encode(op.c_str(), format, tensors, message, chunks, scale, error,
                    first_of(rounding...));
  }

  static void decode(const at::Tensor& message, at::TensorList tensors, Setting... settings,
                     int64_t shards, at::OptionalIntArrayRef sizes) {
    static const auto op = name("_decode");
    const auto format = Codec::check(op.c_str(), settings...);
    const auto chunks =
        check_decode(op.c_str(), message, tensors, Codec::form(format), shards, sizes);
    Kernels::decode(op.c_str(), format, message, tensors, chunks);
  }

  static void decode_sum(const at::Tensor& messages, at::TensorList tensors, Setting... settings,
                         double scale) {
    static const auto op = name("_decode_sum");
    const auto format = Codec::check(op.c_str(), settings...);
    const auto layout = check_decode_sum(op.c_str(), messages, tensors, Codec::form(format));
    Kernels::decode_sum(op.c_str(), format, messages, tensors, layout, scale);
  }

  static void reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel,
                     Setting... settings, double scale, const OptionalTensor& error,
                     Rounding... rounding) {
    static const auto op = name("_reduce");
    const auto format = Codec::check(op.c_str(), settings...);
    const auto layout = check_reduce(op.c_str(), messages, message, Codec::form(format), numel,
                                     error, first_of(rounding...));
    Kernels::reduce(op.c_str(), format, messages, message, layout, scale, error,
                    first_of(rounding...));
  }

  static void reduce_shards(at::TensorList messages, const at::Tensor& message, int64_t numel,
                            Setting... settings, double scale, const OptionalTensor& error,
                            Rounding... rounding, const OptionalTensor& failed) {
    static const auto op = name("_reduce_shards");
    const auto format = Codec::check(op.c_str(), settings...);
    const auto layout = check_reduce_shards(op.c_str(), messages, message, Codec::form(format),
                                            numel, error, first_of(rounding...), failed);
    Kernels::reduce_shards(op.c_str(), format, messages, message, layout, scale, error,
                           first_of(rounding...), failed);
  }

  static std::string name(const char* operation) { return Codec::kName + std::string(operation); }

 private:
  static OptionalTensor first_of() { return std::nullopt; }
  static const OptionalTensor& first_of(const OptionalTensor& rounding) { return rounding; }
};

// Defines the operators.
template <typename Codec>
void define_operators(torch::Library& m) {
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};
  const std::string name = Codec::kName;
  const std::string settings = Codec::kSettings;
  const std::string rounding = Codec::kRounds ? ", Tensor? rounding=None" : "";
  const auto define = [&](const std::string& operation, const std::string& arguments) {
    m.def((name + operation + "(" + arguments + ") -> ()").c_str(), compliant);
  };
  m.set_python_module("torch_commhook.codecs.block_codec");

  // Writes the message of a bucket, or one message for each run of values that `sizes` gives:
  // float32(value) * scale + error, encoded in blocks. Writes the new error into `error`. Rounds at
  // random if `rounding` holds a seed and a step.
  define("_encode", "Tensor[] tensors, Tensor(a!) message, *, " + settings +
                        ", int shards=1, SymInt[]? sizes=None, float scale=1.0, "
                        "Tensor(b!)? error=None" +
                        rounding);
  // Writes a message's values into tensors.
  define("_decode", "Tensor message, Tensor(a!)[] tensors, *, " + settings +
                        ", int shards=1, SymInt[]? sizes=None");
  // Writes scale * (sum of the values of several messages) into tensors.
  define("_decode_sum",
         "Tensor messages, Tensor(a!)[] tensors, *, " + settings + ", float scale=1.0");
  // Writes the message of scale * (sum of the values of several messages) + error.
  define("_reduce", "Tensor messages, Tensor(a!) message, int numel, *, " + settings +
                        ", float scale=1.0, Tensor(b!)? error=None" + rounding);
  // The same for messages in separate tensors, such as those that other ranks share. Reads and
  // writes nothing if `failed` is not zero.
  define("_reduce_shards", "Tensor[] messages, Tensor(a!) message, int numel, *, " + settings +
                               ", float scale=1.0, Tensor(b!)? error=None" + rounding +
                               ", Tensor? failed=None");
}

// Registers a device's kernels.
template <typename Codec, typename Kernels>
void implement_operators(torch::Library& m) {
  using Operators = BlockOperators<Codec, Kernels>;
  m.impl(Operators::name("_encode").c_str(), Operators::encode);
  m.impl(Operators::name("_decode").c_str(), Operators::decode);
  m.impl(Operators::name("_decode_sum").c_str(), Operators::decode_sum);
  m.impl(Operators::name("_reduce").c_str(), Operators::reduce);
  m.impl(Operators::name("_reduce_shards").c_str(), Operators::reduce_shards);
}

// Registers the same function of ops/mutation.h for all operators.
template <typename Codec, c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* function>
void implement_boxed(torch::Library& m) {
  for (const auto* operation : {"_encode", "_decode", "_decode_sum", "_reduce", "_reduce_shards"}) {
    m.impl((Codec::kName + std::string(operation)).c_str(),
           torch::CppFunction::makeFromBoxedFunction<function>());
  }
}

// Defines a codec's operators, with kernels for all devices that have none of their own.
#define COMMHOOK_BLOCK_OPERATORS(Codec, Kernels)                                        \
  TORCH_LIBRARY_FRAGMENT(commhook, m) { commhook::codecs::define_operators<Codec>(m); } \
  TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {                          \
    commhook::codecs::implement_operators<Codec, Kernels>(m);                           \
  }                                                                                     \
  TORCH_LIBRARY_IMPL(commhook, Autograd, m) {                                           \
    commhook::codecs::implement_boxed<Codec, &commhook::refuse_recorded>(m);            \
  }                                                                                     \
  TORCH_LIBRARY_IMPL(commhook, ADInplaceOrView, m) {                                    \
    commhook::codecs::implement_boxed<Codec, &commhook::move_versions>(m);              \
  }

}  // namespace commhook::codecs
