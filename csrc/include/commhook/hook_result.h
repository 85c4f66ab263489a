// Extracts the gradients' tensor from the value of a hook's Future.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace commhook {

// The tensor in a completed Future's value: a tensor, or a list or tuple with one. Throws TypeError
// or ValueError for everything else, including undefined tensors; the message begins with `where`.
inline at::Tensor parseCppCommHookResult(const c10::IValue& result, const std::string& where = "") {
  const std::string expected =
      where + (where.empty() ? "" : ": ") +
      "the result must be a tensor, or a list or tuple of one tensor, got ";
  at::Tensor tensor;
  if (result.isTensor()) {
    tensor = result.toTensor();
  } else if (result.isTensorList() || result.isList() || result.isTuple()) {
    const auto values = result.isTuple() ? result.toTupleRef().elements().vec()
                                         : std::vector(result.toListRef().vec());
    TORCH_CHECK_VALUE(values.size() == 1, expected, result.isTuple() ? "a tuple" : "a list", " of ",
                      values.size());
    TORCH_CHECK_TYPE(values[0].isTensor(), expected, result.isTuple() ? "a tuple" : "a list",
                     " of ", values[0].tagKind());
    tensor = values[0].toTensor();
  } else {
    TORCH_CHECK_TYPE(false, expected, result.tagKind());
  }
  TORCH_CHECK_TYPE(tensor.defined(), expected, "an undefined tensor");
  return tensor;
}

}  // namespace commhook
