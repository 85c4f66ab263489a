// The bucket operators in plain ATen: they serve every device without fast kernels, and tests
// compare the fast kernels with them.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "ops/bucket/bucket.h"

namespace commhook {

std::vector<at::Tensor> empty_like(at::TensorList like) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(like.size());
  for (const auto& tensor : like) {
    tensors.push_back(at::empty_like(tensor));
  }
  return tensors;
}

namespace reference {

at::Tensor scaled(const at::Tensor& tensor, double scale, at::ScalarType to) {
  if (scale == 1.0 && tensor.scalar_type() == to) {
    return tensor.reshape(-1);  // bit for bit: a conversion there and back changes some NaNs
  }
  const auto flat = tensor.reshape(-1).to(scaling_dtype(tensor.scalar_type(), to));
  return scale == 1.0 ? flat : flat.mul(scale);
}

namespace {

at::Tensor concatenate(at::TensorList tensors, double scale, at::ScalarType dtype) {
  std::vector<at::Tensor> pieces;
  pieces.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    pieces.push_back(scaled(tensor, scale, dtype).to(dtype));
  }
  return at::cat(pieces);
}

}  // namespace

at::Tensor flatten(at::TensorList tensors, double scale, std::optional<at::ScalarType> dtype) {
  return concatenate(tensors, scale, check_flatten("flatten", tensors, dtype));
}

at::Tensor& flatten_out(at::TensorList tensors, double scale, at::Tensor& out) {
  check_flatten_out("flatten", tensors, out);
  auto flat = out.detach().view(-1);
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    flat.narrow(0, offset, tensor.numel()).copy_(scaled(tensor, scale, out.scalar_type()));
    offset += tensor.numel();
  }
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flatten_stats(at::TensorList tensors, double scale,
                                                             std::optional<at::ScalarType> dtype) {
  const auto to = check_flatten("flatten_stats", tensors, dtype);
  auto buffer = concatenate(tensors, scale, to);
  auto sum_of_squares = at::zeros({}, tensors[0].options().dtype(at::kDouble));
  for (const auto& tensor : tensors) {
    sum_of_squares = sum_of_squares + scaled(tensor, scale, to).to(at::kDouble).square().sum();
  }
  auto nonfinite_count = buffer.isfinite().logical_not().sum();
  return {std::move(buffer), std::move(sum_of_squares), std::move(nonfinite_count)};
}

std::vector<at::Tensor> unflatten(const at::Tensor& buffer, at::TensorList like, double scale) {
  check_unflatten("unflatten", buffer, like, "like");
  auto tensors = empty_like(like);
  unflatten_into(buffer, tensors, scale);
  return tensors;
}

void unflatten_into(const at::Tensor& buffer, at::TensorList tensors, double scale) {
  check_unflatten_into("unflatten_into", buffer, tensors);
  const auto flat = buffer.detach().view(-1);
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    const auto piece = flat.narrow(0, offset, tensor.numel());
    tensor.detach().copy_(scaled(piece, scale, tensor.scalar_type()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

}  // namespace reference

namespace {

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("flatten", reference::flatten);
  m.impl("flatten.out", reference::flatten_out);
  m.impl("flatten_stats", reference::flatten_stats);
  m.impl("unflatten", reference::unflatten);
  m.impl("unflatten_into", reference::unflatten_into);
}

}  // namespace
}  // namespace commhook
