// What a model's parameters are like while a hook is attached.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace commhook {

// Parameters whose dtype, device and shape must stay what they are: buckets were formed for these.
// With `in_ddp`, DDP's reducer must also go on waiting for them, which a conversion ends for good,
// even one that is undone.
class ParameterForms {
 public:
  ParameterForms(std::vector<at::Tensor> parameters, bool in_ddp);

  // The first parameter that has changed: its number, and what has happened to it.
  std::optional<std::pair<int64_t, std::string>> change() const;

  // Holds the parameters no longer.
  void clear();

 private:
  struct Form {
    at::Tensor parameter;
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;
  };
  std::vector<Form> forms_;
  const bool in_ddp_;
};

}  // namespace commhook
