#include "runtime/reducer/parameter_forms.h"

#include <c10/util/StringUtil.h>

#include <utility>

#include "ops/type_names.h"
#include "runtime/reducer/ddp_detection.h"

namespace commhook {
namespace {

std::string form_name(at::ScalarType dtype, at::IntArrayRef sizes, at::Device device) {
  return c10::str(dtype_name(dtype), " of shape ", sizes, " on ", device);
}

std::string optional_name(std::optional<at::ScalarType> dtype) {
  return dtype ? dtype_name(*dtype) : "None";
}

}  // namespace

ParameterForms::ParameterForms(std::vector<at::Tensor> parameters, bool in_ddp) : in_ddp_(in_ddp) {
  forms_.reserve(parameters.size());
  for (auto& parameter : parameters) {
    const auto dtype = parameter.scalar_type();
    const auto device = parameter.device();
    auto sizes = parameter.sizes().vec();
    // DDP itself refuses gradients of another dtype.
    const auto grad_dtype = in_ddp ? std::nullopt : parameter.grad_dtype();
    forms_.push_back({std::move(parameter), dtype, device, std::move(sizes), grad_dtype});
  }
}

std::optional<std::pair<int64_t, std::string>> ParameterForms::change() const {
  for (size_t i = 0; i < forms_.size(); ++i) {
    const auto& [parameter, dtype, device, sizes, grad_dtype] = forms_[i];
    if (parameter.scalar_type() != dtype || parameter.device() != device ||
        parameter.sizes() != sizes) {
      const auto now = form_name(parameter.scalar_type(), parameter.sizes(), parameter.device());
      return std::pair(static_cast<int64_t>(i),
                       c10::str("was ", form_name(dtype, sizes, device), ", and is ", now, " now"));
    }
    if (!in_ddp_ && parameter.grad_dtype() != grad_dtype) {
      return std::pair(static_cast<int64_t>(i),
                       c10::str("had grad_dtype ", optional_name(grad_dtype), ", and has ",
                                optional_name(parameter.grad_dtype()), " now"));
    }
    if (in_ddp_ && !has_ddp_hook(parameter)) {
      return std::pair(static_cast<int64_t>(i),
                       std::string("has been converted or moved, after which "
                                   "DistributedDataParallel no longer averages its gradient"));
    }
  }
  return std::nullopt;
}

void ParameterForms::clear() { forms_.clear(); }

}  // namespace commhook
