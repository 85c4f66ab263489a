// Detects changes of a model's parameters while a hook is attached.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace commhook {

// Parameters that must keep their dtype, device, shape and, without DDP, their gradients' dtype,
// since the buckets depend on these. With `in_ddp`, DDP's reducer must also keep waiting for them.
// A conversion ends that for good, even if it is undone.
class ParameterForms {
 public:
  ParameterForms(std::vector<at::Tensor> parameters, bool in_ddp);

  // The first changed parameter: its number, and a description of the change.
  std::optional<std::pair<int64_t, std::string>> change() const;

  // Releases the parameters.
  void clear();

 private:
  struct Form {
    at::Tensor parameter;
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;
    std::optional<at::ScalarType> grad_dtype;
  };
  std::vector<Form> forms_;
  const bool in_ddp_;
};

}  // namespace commhook
