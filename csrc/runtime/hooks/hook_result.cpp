#include "runtime/hooks/hook_result.h"

#include <ATen/ATen.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "commhook/hook_result.h"
#include "ops/type_names.h"
#include "runtime/python/hook_names.h"

namespace py = pybind11;

namespace commhook {
namespace {

constexpr const char* kExpected =
    ": the result must be a tensor, or a list or tuple of one tensor, got ";

std::string shape_name(at::IntArrayRef sizes) {
  return sizes.size() == 1 ? c10::str(sizes[0], " elements") : c10::str("shape ", sizes);
}

}  // namespace

ResultSpec::ResultSpec(std::string where, const at::Tensor& buffer)
    : where(std::move(where)),
      sizes(buffer.sizes().vec()),
      dtype(buffer.scalar_type()),
      device(buffer.device()),
      layout(buffer.layout()) {}

ResultSpec::ResultSpec(std::string where, GradBucket& bucket)
    : where(std::move(where)),
      sizes(bucket.isSparse() ? bucket.getBuffer().sizes().vec() : std::vector{bucket.numel()}),
      dtype(bucket.dtype()),
      device(bucket.device()),
      layout(bucket.isSparse() ? bucket.getBuffer().layout() : at::kStrided) {}

bool is_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.scalar_type() == b.scalar_type() &&
         a.numel() == b.numel();
}

at::Tensor check_result(const at::Tensor& result, const ResultSpec& spec) {
  TORCH_CHECK_TYPE(result.defined(), spec.where, kExpected, "an undefined tensor");
  TORCH_CHECK_TYPE(result.layout() == spec.layout, spec.where,
                   ": the result must have the bucket's layout, ", layout_name(spec.layout),
                   ", got ", layout_name(result.layout()));
  TORCH_CHECK_TYPE(result.scalar_type() == spec.dtype, spec.where, ": the result must have dtype ",
                   dtype_name(spec.dtype), ", got ", dtype_name(result.scalar_type()));
  TORCH_CHECK_VALUE(result.device() == spec.device, spec.where, ": the result must be on ",
                    spec.device, ", got ", result.device());
  if (spec.layout != at::kStrided) {
    TORCH_CHECK_VALUE(result.sizes() == at::IntArrayRef(spec.sizes), spec.where,
                      ": the result must have ", shape_name(spec.sizes), ", got ",
                      shape_name(result.sizes()));
    return result;
  }
  TORCH_CHECK_VALUE(result.numel() == c10::multiply_integers(spec.sizes), spec.where,
                    ": the result must have ", c10::multiply_integers(spec.sizes),
                    " elements, one for each of the bucket's, got ", shape_name(result.sizes()));
  return result.sizes() == at::IntArrayRef(spec.sizes) && result.is_contiguous()
             ? result
             : result.contiguous().view(spec.sizes);
}

at::Tensor tensor_in(const py::object& value, const std::string& where) {
  if (THPVariable_Check(value.ptr())) {
    return THPVariable_Unpack(value.ptr());
  }
  if (PyExceptionInstance_Check(value.ptr())) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
    throw py::error_already_set();
  }
  if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
    const auto sequence = py::reinterpret_borrow<py::sequence>(value);
    TORCH_CHECK_VALUE(sequence.size() == 1, where, kExpected, "a ", type_name(value), " of ",
                      sequence.size());
    const py::object element = sequence[0];
    TORCH_CHECK_TYPE(THPVariable_Check(element.ptr()), where, kExpected, "a ", type_name(value),
                     " of ", type_name(element));
    return THPVariable_Unpack(element.ptr());
  }
  const bool future = py::isinstance<torch::jit::PythonFutureWrapper>(value);
  TORCH_CHECK_TYPE(false, where, kExpected, type_name(value),
                   future ? "; a callback must return the tensor, not another Future" : "");
}

at::Tensor tensor_in(const c10::IValue& value, const std::string& where) {
  if (!value.isPyObject()) {
    return parseCppCommHookResult(value, where);
  }
  py::gil_scoped_acquire gil;
  try {
    return tensor_in(torch::jit::toPyObject(value), where);
  } catch (py::error_already_set& error) {
    std::rethrow_exception(persistent(error));
  }
}

py::object python_exception(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& raised) {
    return raised.value();
  } catch (const std::exception&) {
    torch::translate_exception_to_python(error);
    return py::error_already_set().value();
  } catch (...) {
    return py::module_::import("builtins").attr("RuntimeError")("unknown exception");
  }
}

std::exception_ptr persistent(py::error_already_set& error) {
  error.restore();
  python_error persisted;
  persisted.persist();
  return std::make_exception_ptr(std::move(persisted));
}

}  // namespace commhook
