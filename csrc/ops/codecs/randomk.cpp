// Values at random places: the operators, and their kernels in plain ATen. These serve every
// device; all other kernels give the same bits. torch_commhook/codecs/sparse_codec.py has the
// codec.
//
// A message of k entries holds k float32 values without their indices, which follow from a seed and
// a step (randomk_math.h). So messages with the same seed and step can be added. If any of all
// values is infinite or NaN, all values that are sent are NaN, and no error is dropped. Otherwise
// such a value would go unnoticed at a place that is not sent. The value itself leaves no error.
#include "ops/codecs/randomk.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/bucket/bucket.h"
#include "ops/codecs/codec_checks.h"
#include "ops/codecs/codec_reference.h"
#include "ops/cpu/capability.h"
#include "ops/mutation.h"

namespace commhook::randomk {
namespace {

// Checks the arguments of both operators; returns the number of all values.
int64_t check(const char* op, at::TensorList tensors, const at::Tensor& message,
              const at::Tensor& rounding) {
  check_flatten(op, tensors, at::kFloat);
  const int64_t numel = total_numel(tensors);
  TORCH_CHECK_VALUE(numel <= std::numeric_limits<int32_t>::max(), op,
                    ": tensors must hold less than 2^31 elements, got ", numel);
  codecs::check_message(op, "message", message, message.numel());
  const int64_t bytes = message.numel();
  const int64_t count = bytes / kBytesOfEntry;
  TORCH_CHECK_VALUE(bytes % kBytesOfEntry == 0 && count <= numel && (count > 0 || numel == 0), op,
                    ": message must hold 4 bytes for each of 1 to ", numel, " entries, got ", bytes,
                    " bytes");
  const auto device = tensors[0].device();
  codecs::check_device(op, "message", message, device);
  codecs::check_rounding(op, rounding, device);
  return numel;
}

}  // namespace

int64_t check_encode(at::TensorList tensors, const at::Tensor& message, const at::Tensor& rounding,
                     bool unbiased, const std::optional<at::Tensor>& error, double& scale) {
  constexpr const char* kOp = "randomk_encode";
  const int64_t numel = check(kOp, tensors, message, rounding);
  codecs::check_error(kOp, error, numel, message.device());
  codecs::check_encoded_apart(kOp, tensors, message, error);
  if (unbiased) {
    TORCH_CHECK_VALUE(!codecs::is_there(error), kOp,
                      ": error must be None if unbiased is True, because the sent values are "
                      "scaled; got a tensor");
    const int64_t count = std::max<int64_t>(1, message.numel() / kBytesOfEntry);
    scale *= static_cast<double>(numel) / static_cast<double>(count);
  }
  return numel;
}

int64_t check_decode(const at::Tensor& message, at::TensorList tensors,
                     const at::Tensor& rounding) {
  const int64_t numel = check("randomk_decode", tensors, message, rounding);
  check_destinations("randomk_decode", message, "message", tensors);
  return numel;
}

namespace {

// ---- kernels in plain ATen ---------------------------------------------------------------------

at::Tensor indices_of(const Draw& draw, int64_t count, at::Device device) {
  auto indices = at::empty({count}, at::kLong);
  auto* const to = indices.mutable_data_ptr<int64_t>();
  for (int64_t entry = 0; entry < count; ++entry) {
    to[entry] = index_of(draw, static_cast<uint32_t>(entry));
  }
  return indices.to(device);
}

void encode_reference(at::TensorList tensors, const at::Tensor& message, const Draw& draw,
                      double scale, const std::optional<at::Tensor>& error) {
  const auto p = codecs::reference::compensated(codecs::reference::flat_of(tensors), scale, error);
  const auto indices = indices_of(draw, message.numel() / kBytesOfEntry, p.device());
  const auto is_finite = p.isfinite();
  const auto are_finite = is_finite.all();
  const auto sent =
      at::where(are_finite, p.index_select(0, indices), std::numeric_limits<float>::quiet_NaN());
  message.view(-1).copy_(sent.to(at::kFloat).view(at::kByte));
  if (codecs::is_there(error)) {
    const auto kept = at::where(is_finite, p, 0.0).to(at::kFloat);
    codecs::reference::keep(at::where(are_finite, kept.index_fill(0, indices, 0.0), kept),
                            error->detach().view(-1),
                            codecs::noise_key(draw.seed0, draw.seed1, draw.step));
  }
}

void decode_reference(const at::Tensor& message, at::TensorList tensors, const Draw& draw) {
  const auto values = message.view(-1).clone().view(at::kFloat);
  const auto indices = indices_of(draw, values.numel(), values.device());
  const auto flat = at::zeros({draw.numel}, values.options()).index_copy(0, indices, values);
  reference::unflatten_into(flat, tensors, 1.0);
}

// ---- the operators -----------------------------------------------------------------------------

// The random numbers that give the indices.
Draw draw_for(int64_t numel, const at::Tensor& rounding) {
  const auto drawn = codecs::reference::rounding_on_host(rounding);
  return draw_from(numel, drawn.seed0, drawn.seed1, drawn.step);
}

void encode(at::TensorList tensors, const at::Tensor& message, const at::Tensor& rounding,
            bool unbiased, double scale, const std::optional<at::Tensor>& error) {
  const int64_t numel = check_encode(tensors, message, rounding, unbiased, error, scale);
  const auto draw = draw_for(numel, rounding);
  if (cpu::serve(message.device())) {
    return encode_on_cpu(tensors, message, draw, scale, error);
  }
  encode_reference(tensors, message, draw, scale, error);
}

void decode(const at::Tensor& message, at::TensorList tensors, const at::Tensor& rounding) {
  const auto draw = draw_for(check_decode(message, tensors, rounding), rounding);
  if (cpu::serve(message.device())) {
    return decode_on_cpu(message, tensors, draw);
  }
  decode_reference(message, tensors, draw);
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.codecs.sparse_codec");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // Writes the message of a bucket: values of float32(value) * scale + error at places that follow
  // from a seed and a step, as many as it has room for. Writes the values that are not sent into
  // `error`, which is rounded at random if it is bfloat16.
  // With `unbiased`, scales by the number of all values over the number of values that are sent.
  m.def(
      "randomk_encode(Tensor[] tensors, Tensor(a!) message, Tensor rounding, *, "
      "bool unbiased=False, float scale=1.0, Tensor(b!)? error=None) -> ()",
      compliant);
  // Writes a message's values into tensors, and zeros elsewhere.
  m.def("randomk_decode(Tensor message, Tensor(a!)[] tensors, Tensor rounding) -> ()", compliant);
}

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("randomk_encode", encode);
  m.impl("randomk_decode", decode);
}

}  // namespace
}  // namespace commhook::randomk

COMMHOOK_MUTATING_OPERATOR(commhook, "randomk_encode")
COMMHOOK_MUTATING_OPERATOR(commhook, "randomk_decode")
