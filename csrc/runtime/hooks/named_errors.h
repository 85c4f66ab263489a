// Adds the names of C++ hooks to their errors.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <stdexcept>
#include <string>

namespace commhook {

// Runs call(), and puts `where` into the message of its exceptions. Exceptions of torch keep their
// type. Others become std::runtime_error, since the autograd engine ends the process for anything
// that is not a std::exception.
template <typename Call>
auto named_errors(const std::string& where, const Call& call) {
  try {
    return call();
  } catch (c10::Error& error) {
    error.add_context("raised by " + where);
    throw;
  } catch (const python_error&) {  // a Python exception, with its traceback
    throw;
  } catch (const pybind11::error_already_set&) {
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(where + ": " + error.what());
  } catch (...) {
    throw std::runtime_error(where + ": threw an object that is not a std::exception");
  }
}

// The same for an existing exception.
inline std::exception_ptr named_error(const std::string& where, const std::exception_ptr& error) {
  try {
    named_errors(where, [&] { std::rethrow_exception(error); });
  } catch (...) {
    return std::current_exception();
  }
  return error;
}

}  // namespace commhook
