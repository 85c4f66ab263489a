// The values of largest magnitude: the operators, and their kernels in plain ATen. These serve
// every device; all other kernels give the same bits. torch_commhook/codecs/sparse_codec.py has the
// codec.
//
// A message of k entries holds k ascending int32 indices, then their k float32 values. Of values of
// equal magnitude, those with the lowest indices are sent; infinities rank above all numbers, and
// NaN above infinities. A value that is sent leaves no error. An infinity or NaN that is not sent
// leaves none either, since it would stay in all later messages.
#include "ops/codecs/topk.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <tuple>
#include <vector>

#include "ops/bucket/bucket.h"
#include "ops/codecs/codec_checks.h"
#include "ops/codecs/codec_reference.h"
#include "ops/cpu/capability.h"
#include "ops/mutation.h"

namespace commhook::topk {

void check_indices(const char* op, bool are_good, int64_t numel) {
  TORCH_CHECK_VALUE(are_good, op,
                    ": a message's indices must be ascending, at least 0 and less than ", numel);
}

namespace {

constexpr const char* kEncode = "topk_encode";
constexpr const char* kDecode = "topk_decode";
constexpr const char* kDecodeSum = "topk_decode_sum";

// bytes: the bytes of a message of `numel` values.
void check_bytes(const char* op, const char* argument, int64_t bytes, int64_t numel) {
  TORCH_CHECK_VALUE(numel <= std::numeric_limits<int32_t>::max(), op,
                    ": tensors must hold less than 2^31 elements, got ", numel);
  const int64_t count = bytes / kBytesOfEntry;
  TORCH_CHECK_VALUE(bytes % kBytesOfEntry == 0 && count <= numel && (count > 0 || numel == 0), op,
                    ": ", argument, " must hold 8 bytes for each of 1 to ", numel, " entries, got ",
                    bytes, " bytes");
}

void check_decoded(const char* op, const char* argument, const at::Tensor& messages, int64_t bytes,
                   at::TensorList tensors) {
  check_bytes(op, argument, bytes, total_numel(tensors));
  codecs::check_device(op, argument, messages, tensors[0].device());
  check_destinations(op, messages, argument, tensors);
}

}  // namespace

int64_t check_encode(at::TensorList tensors, const at::Tensor& message,
                     const std::optional<at::Tensor>& error,
                     const std::optional<at::Tensor>& rounding) {
  check_flatten(kEncode, tensors, at::kFloat);
  const auto device = tensors[0].device();
  const int64_t numel = total_numel(tensors);
  codecs::check_message(kEncode, "message", message, message.numel());
  check_bytes(kEncode, "message", message.numel(), numel);
  codecs::check_device(kEncode, "message", message, device);
  codecs::check_error(kEncode, error, numel, device);
  codecs::check_rounding(kEncode, rounding, device);
  codecs::check_encoded_apart(kEncode, tensors, message, error);
  return numel;
}

void check_decode(const at::Tensor& message, at::TensorList tensors) {
  check_flatten(kDecode, tensors, at::kFloat);
  codecs::check_message(kDecode, "message", message, message.numel());
  check_decoded(kDecode, "message", message, message.numel(), tensors);
}

void check_decode_sum(const at::Tensor& messages, at::TensorList tensors) {
  check_flatten(kDecodeSum, tensors, at::kFloat);
  TORCH_CHECK_VALUE(messages.dim() == 2 && messages.size(0) >= 1, kDecodeSum,
                    ": messages must have two dimensions, one row for each message, got sizes ",
                    messages.sizes());
  codecs::check_message(kDecodeSum, "messages", messages, messages.numel());
  check_decoded(kDecodeSum, "messages", messages, messages.size(1), tensors);
}

namespace {

// ---- kernels in plain ATen ---------------------------------------------------------------------

at::Tensor ranks_of(const at::Tensor& p) {
  return p.view(at::kInt)
      .bitwise_and(static_cast<int64_t>(kAbsolute))
      .clamp_max(static_cast<int64_t>(kInfinity) + 1);
}

void encode_reference(at::TensorList tensors, const at::Tensor& message, double scale,
                      const std::optional<at::Tensor>& error,
                      const std::optional<at::Tensor>& rounding) {
  const int64_t count = message.numel() / kBytesOfEntry;
  const auto p = codecs::reference::compensated(codecs::reference::flat_of(tensors), scale, error);
  const auto order = std::get<1>(ranks_of(p).sort(/*stable=*/true, /*dim=*/0, /*descending=*/true));
  const auto indices = std::get<0>(order.narrow(0, 0, count).sort());
  const auto values = p.index_select(0, indices);
  const auto sent =
      at::where(values.isnan(), std::numeric_limits<float>::quiet_NaN(), values).to(at::kFloat);
  const auto bytes = message.view(-1);
  bytes.narrow(0, 0, 4 * count).copy_(indices.to(at::kInt).view(at::kByte));
  bytes.narrow(0, 4 * count, 4 * count).copy_(sent.view(at::kByte));
  if (codecs::is_there(error)) {
    const auto lost = at::where(p.isfinite(), p, 0.0).to(at::kFloat).index_fill(0, indices, 0.0);
    codecs::reference::keep(lost, error->detach().view(-1), codecs::reference::key_of(rounding));
  }
}

// All values of one message.
at::Tensor restored(const char* op, const at::Tensor& message, int64_t numel) {
  const int64_t count = message.numel() / kBytesOfEntry;
  const auto indices = message.narrow(0, 0, 4 * count).clone().view(at::kInt).to(at::kLong);
  const auto values = message.narrow(0, 4 * count, 4 * count).clone().view(at::kFloat);
  auto is_wrong = indices.lt(0).logical_or(indices.ge(numel)).any();
  if (count > 1) {
    is_wrong = is_wrong.logical_or(indices.diff().le(0).any());
  }
  check_indices(op, !is_wrong.item<bool>(), numel);
  return at::zeros({numel}, values.options()).index_copy(0, indices, values);
}

void decode_sum_reference(const char* op, const at::Tensor& messages, at::TensorList tensors,
                          double scale) {
  const int64_t numel = total_numel(tensors);
  at::Tensor sum;
  for (const auto& message : messages.unbind(0)) {
    const auto values = restored(op, message, numel);
    sum = sum.defined() ? sum + values : values;
  }
  reference::unflatten_into(codecs::reference::compensated(sum, scale, {}), tensors, 1.0);
}

// ---- the operators -----------------------------------------------------------------------------

void encode(at::TensorList tensors, const at::Tensor& message, double scale,
            const std::optional<at::Tensor>& error, const std::optional<at::Tensor>& rounding) {
  check_encode(tensors, message, error, rounding);
  if (cpu::serve(message.device())) {
    return encode_on_cpu(tensors, message, scale, error, rounding);
  }
  encode_reference(tensors, message, scale, error, rounding);
}

void write_sum_of_messages(const char* op, const at::Tensor& messages, at::TensorList tensors,
                           double scale) {
  if (cpu::serve(messages.device())) {
    return decode_sum_on_cpu(op, messages, tensors, scale);
  }
  decode_sum_reference(op, messages, tensors, scale);
}

void decode(const at::Tensor& message, at::TensorList tensors) {
  check_decode(message, tensors);
  write_sum_of_messages(kDecode, message.view({1, message.numel()}), tensors, 1.0);
}

void decode_sum(const at::Tensor& messages, at::TensorList tensors, double scale) {
  check_decode_sum(messages, tensors);
  write_sum_of_messages(kDecodeSum, messages, tensors, scale);
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.codecs.sparse_codec");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // Writes the message of a bucket: the values of float32(value) * scale + error of largest
  // magnitude, as many as it has room for. Writes the values that are not sent into `error`. A
  // bfloat16 error is rounded at random if `rounding` holds a seed and a step.
  m.def(
      "topk_encode(Tensor[] tensors, Tensor(a!) message, *, float scale=1.0, "
      "Tensor(b!)? error=None, Tensor? rounding=None) -> ()",
      compliant);
  // Writes a message's values into tensors, and zeros elsewhere.
  m.def("topk_decode(Tensor message, Tensor(a!)[] tensors) -> ()", compliant);
  // Writes scale * (sum of the values of several messages) into tensors.
  m.def("topk_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, float scale=1.0) -> ()",
        compliant);
}

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("topk_encode", encode);
  m.impl("topk_decode", decode);
  m.impl("topk_decode_sum", decode_sum);
}

}  // namespace
}  // namespace commhook::topk

COMMHOOK_MUTATING_OPERATOR(commhook, "topk_encode")
COMMHOOK_MUTATING_OPERATOR(commhook, "topk_decode")
COMMHOOK_MUTATING_OPERATOR(commhook, "topk_decode_sum")
