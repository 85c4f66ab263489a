// What C++ hooks throw, with their name.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <stdexcept>
#include <string>

namespace commhook {

// call(), with `where` in the message of what it throws. Exceptions of torch keep their type;
// others become std::runtime_error, since the autograd engine stops the process for what is no
// std::exception.
template <typename Call>
auto named_errors(const std::string& where, const Call& call) {
  try {
    return call();
  } catch (c10::Error& error) {
    error.add_context("raised by " + where);
    throw;
  } catch (const python_error&) {  // Python's own, with its traceback
    throw;
  } catch (const pybind11::error_already_set&) {
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(where + ": " + error.what());
  } catch (...) {
    throw std::runtime_error(where + ": threw something that is no std::exception");
  }
}

// The same for an exception that is at hand.
inline std::exception_ptr named_error(const std::string& where, const std::exception_ptr& error) {
  try {
    named_errors(where, [&] { std::rethrow_exception(error); });
  } catch (...) {
    return std::current_exception();
  }
  return error;
}

}  // namespace commhook
