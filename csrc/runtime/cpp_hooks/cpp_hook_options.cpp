#include "runtime/cpp_hooks/cpp_hook_options.h"

#include <torch/csrc/Dtype.h>

#include "ops/type_names.h"
#include "runtime/python/hook_names.h"

namespace py = pybind11;

namespace commhook {
namespace {

constexpr const char* kTypeNames[] = {"a bool", "an int", "a float", "a str", "a torch.dtype"};

// None if UTF-8 cannot encode the text.
std::optional<std::string> utf8(const py::handle& text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (bytes == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string(bytes, static_cast<size_t>(size));
}

// The value as Python prints it, with escapes for all but ASCII.
std::string printed(const py::handle& value) {
  const auto text = py::reinterpret_steal<py::str>(PyObject_ASCII(value.ptr()));
  if (!text) {
    throw py::error_already_set();
  }
  return text;
}

py::object in_python(const OptionValue& value) {
  if (const auto* dtype = std::get_if<at::ScalarType>(&value)) {
    return py::cast(*dtype);
  }
  return std::visit(
      [](const auto& plain) -> py::object {
        if constexpr (std::is_same_v<std::decay_t<decltype(plain)>, at::ScalarType>) {
          return py::none();
        } else {
          return py::cast(plain);
        }
      },
      value);
}

std::string written(const OptionValue& value) { return printed(in_python(value)); }

// For example "threshold (a float, 0.001 by default)".
std::string described(const OptionSpec& option) {
  std::string text = option.name + " (" + kTypeNames[option.type];
  for (const auto& rule : option.rules) {
    text += ", " + rule.contract;
  }
  return text +
         (option.default_value ? ", " + written(*option.default_value) + " by default" : "") + ")";
}

std::string described(const std::vector<OptionSpec>& options) {
  std::string text;
  for (const auto& option : options) {
    text += (text.empty() ? "" : ", ") + described(option);
  }
  return text.empty() ? "no options" : text;
}

[[noreturn]] void refuse_type(const std::string& where, const OptionSpec& option,
                              const py::handle& value) {
  TORCH_CHECK_TYPE(false, where, ": ", option.name, " must be ", kTypeNames[option.type], ", got ",
                   printed(value));
}

OptionValue converted(const std::string& where, const OptionSpec& option, const py::handle& value) {
  const bool is_bool = PyBool_Check(value.ptr());
  switch (option.type) {
    case 0:
      if (is_bool) {
        return value.is(py::handle(Py_True));
      }
      break;
    case 1:
      if (PyIndex_Check(value.ptr()) && !is_bool) {
        const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
        int overflow = 0;
        const auto converted_number =
            number ? PyLong_AsLongLongAndOverflow(number.ptr(), &overflow) : 0;
        if (!number) {
          PyErr_Clear();
          break;
        }
        TORCH_CHECK_VALUE(overflow == 0, where, ": ", option.name, " must fit into 64 bits, got ",
                          printed(value));
        return OptionValue(std::in_place_type<int64_t>, converted_number);
      }
      break;
    case 2:
      if (PyFloat_Check(value.ptr()) || (PyLong_Check(value.ptr()) && !is_bool)) {
        const double number = PyFloat_AsDouble(value.ptr());
        const bool too_large = PyErr_Occurred() != nullptr;
        PyErr_Clear();
        TORCH_CHECK_VALUE(!too_large, where, ": ", option.name,
                          " must fit into a float of 64 bits, got a larger int");
        return number;
      }
      break;
    case 3:
      if (PyUnicode_Check(value.ptr())) {
        auto text = utf8(value);
        TORCH_CHECK_VALUE(text, where, ": ", option.name, " must be encodable in UTF-8, got ",
                          printed(value));
        return OptionValue(std::in_place_type<std::string>, *std::move(text));
      }
      break;
    default:
      if (THPDtype_Check(value.ptr())) {
        return py::cast<at::ScalarType>(value);
      }
  }
  refuse_type(where, option, value);
}

}  // namespace

std::string checked_name(const py::str& name) {
  auto text = utf8(name);
  TORCH_CHECK_VALUE(text, "cpp: name must be encodable in UTF-8, got ", printed(name));
  return *std::move(text);
}

std::vector<OptionValue> option_values(const std::string& where,
                                       const std::vector<OptionSpec>& options,
                                       const py::dict& given) {
  size_t known = 0;
  std::vector<OptionValue> values;
  for (const auto& option : options) {
    if (given.contains(option.name)) {
      ++known;
      values.push_back(converted(where, option, given[py::str(option.name)]));
      for (const auto& rule : option.rules) {
        TORCH_CHECK_VALUE(rule.holds(values.back()), where, ": ", option.name, " must be ",
                          rule.contract, ", got ", written(values.back()));
      }
    } else {
      TORCH_CHECK_TYPE(option.default_value, where, ": ", option.name, " must be given; it takes ",
                       described(options));
      values.push_back(*option.default_value);
    }
  }
  if (known == given.size()) {
    return values;
  }
  for (const auto& [name, value] : given) {
    const auto is_known = [&, text = utf8(name)](const OptionSpec& option) {
      return option.name == text;
    };
    TORCH_CHECK_TYPE(std::any_of(options.begin(), options.end(), is_known), where,
                     ": unknown option ", printed(name), "; it takes ", described(options));
  }
  return values;
}

py::dict named_values(const std::vector<OptionSpec>& options,
                      const std::vector<OptionValue>& values) {
  py::dict named;
  for (size_t i = 0; i < options.size(); ++i) {
    named[py::str(options[i].name)] = in_python(values[i]);
  }
  return named;
}

std::string describe(const std::vector<OptionSpec>& options,
                     const std::vector<OptionValue>& values) {
  std::string text;
  for (size_t i = 0; i < options.size(); ++i) {
    text += (i == 0 ? "" : ", ") + options[i].name + "=" + written(values[i]);
  }
  return text;
}

}  // namespace commhook
