#include "runtime/autograd/autograd_hook_run.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "ops/check/hook_value.h"
#include "runtime/hooks/hook_result.h"

namespace py = pybind11;

namespace commhook {
namespace {

// "hook 'f'", with the index of the value if there are several.
std::string where(const AutogradHook& hook, HookKind kind, size_t index, size_t count) {
  std::string text = "hook '" + hook.name() + "'";
  if (kind == HookKind::kPre || kind == HookKind::kPost) {
    text += c10::str(", value ", index, " of ", count);
  }
  return text;
}

void check_not_none(const at::Tensor& was, const AutogradHook& hook, HookKind kind, size_t index,
                    size_t count) {
  TORCH_CHECK(was.defined(), where(hook, kind, index, count),
              ": can't replace a None gradient with a non-None value");
}

void check_value(const at::Tensor& was, const at::Tensor& now, const AutogradHook& hook,
                 HookKind kind, size_t index, size_t count) {
  check_hook_value(was, now, [&] { return where(hook, kind, index, count); });
}

py::object wrapped(const at::Tensor& tensor) {
  return tensor.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor))
                          : py::object(py::none());
}

py::tuple tuple_of(const variable_list& values) {
  py::tuple tuple(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), i, wrapped(values[i]).release().ptr());
  }
  return tuple;
}

// Calls a hook in Python. Needs the GIL.
py::object called(const AutogradHook& hook, PyObject* const* arguments, size_t count) {
  auto result = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(hook.callable().get().ptr(), arguments, count, nullptr));
  if (!result) {
    py::error_already_set error;
    std::rethrow_exception(persistent(error));
  }
  return result;
}

// Checks a hook's result for one value.
const at::Tensor& checked(const py::object& result, const at::Tensor& was, const AutogradHook& hook,
                          HookKind kind, size_t index, size_t count) {
  TORCH_CHECK(kind != HookKind::kPostAccumulate, where(hook, kind, index, count),
              ": Tensor post accumulate grad hooks should return None.");
  check_not_none(was, hook, kind, index, count);
  TORCH_CHECK_TYPE(THPVariable_Check(result.ptr()), where(hook, kind, index, count),
                   ": expected Variable, but hook returned '", Py_TYPE(result.ptr())->tp_name, "'");
  const auto& now = THPVariable_Unpack(result.ptr());
  check_value(was, now, hook, kind, index, count);
  return now;
}

// Runs a list of hooks. Converts the values between C++ and Python only as hooks need them.
class Run {
 public:
  Run(HookKind kind, variable_list values, const variable_list& others)
      : kind_(kind), values_(std::move(values)), others_(others) {}

  ~Run() {
    if (in_python_ || python_others_) {
      py::gil_scoped_acquire gil;
      drop_python();
    }
  }

  // Needs the GIL.
  void drop_python() {
    in_python_ = py::object();
    python_others_ = py::object();
  }

  void python(const AutogradHook& hook) {
    if (!in_python_) {
      in_python_ = several() ? py::object(tuple_of(values_)) : wrapped(values_[0]);
    }
    PyObject* arguments[2] = {in_python_.ptr(), nullptr};
    size_t count = 1;
    if (kind_ == HookKind::kPost) {
      if (!python_others_) {
        python_others_ = tuple_of(others_);
      }
      arguments[count++] = python_others_.ptr();
    }
    const auto result = called(hook, arguments, count);
    if (result.is_none() || result.is(in_python_)) {
      return;
    }
    if (several()) {
      take_tuple(hook, result);
    } else {
      values_[0] = checked(result, values_[0], hook, kind_, 0, 1);
      in_python_ = result;
    }
  }

  void native(const AutogradHook& hook) {
    if (!several() && !values_[0].defined()) {
      return;  // an operator cannot receive an undefined tensor
    }
    variable_list results = hook.native()(values_, others_);
    if (kind_ == HookKind::kPostAccumulate) {
      return;
    }
    check_count(hook, results.size());
    bool changed = false;
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].is_same(values_[i])) {
        continue;
      }
      if (results[i].defined()) {
        check_not_none(values_[i], hook, kind_, i, results.size());
        check_value(values_[i], results[i], hook, kind_, i, results.size());
      }
      values_[i] = std::move(results[i]);
      changed = true;
    }
    if (changed && in_python_) {
      py::gil_scoped_acquire gil;
      in_python_ = py::object();
    }
  }

  variable_list values() { return std::move(values_); }

 private:
  bool several() const { return kind_ == HookKind::kPre || kind_ == HookKind::kPost; }

  void check_count(const AutogradHook& hook, size_t count) const {
    TORCH_CHECK(count == values_.size(), "hook '", hook.name(),
                "' has returned an incorrect number of values (got ", count, ", but expected ",
                values_.size(), ")");
  }

  void take_tuple(const AutogradHook& hook, const py::object& result) {
    TORCH_CHECK_TYPE(PyTuple_Check(result.ptr()), "hook '", hook.name(),
                     "': expected tuple, but hook returned '", Py_TYPE(result.ptr())->tp_name, "'");
    const auto before = py::reinterpret_borrow<py::tuple>(in_python_);
    const auto after = py::reinterpret_borrow<py::tuple>(result);
    check_count(hook, after.size());
    for (size_t i = 0; i < after.size(); ++i) {
      const py::object value = after[i];
      if (value.is_none()) {
        values_[i] = at::Tensor();
      } else if (!value.is(before[i])) {
        values_[i] = checked(value, values_[i], hook, kind_, i, after.size());
      }
    }
    in_python_ = result;
  }

  const HookKind kind_;
  variable_list values_;
  const variable_list& others_;
  py::object in_python_;  // the values as Python objects, if a hook needed them
  py::object python_others_;
};

}  // namespace

variable_list run_autograd_hooks(const HookList::Snapshot& hooks, HookKind kind,
                                 variable_list values, const variable_list& others) {
  Run run(kind, std::move(values), others);
  std::optional<py::gil_scoped_acquire> gil;
  for (const auto& hook : *hooks) {
    if (hook->is_native()) {
      gil.reset();
      run.native(*hook);
    } else {
      if (!gil) {
        gil.emplace();
      }
      run.python(*hook);
    }
  }
  if (gil) {
    run.drop_python();
  }
  return run.values();
}

at::Tensor run_autograd_hooks(const HookList::Snapshot& hooks, HookKind kind,
                              const at::Tensor& value) {
  const auto is_native = [](const auto& hook) { return hook->is_native(); };
  if (std::any_of(hooks->begin(), hooks->end(), is_native)) {
    return run_autograd_hooks(hooks, kind, {value}, {})[0];
  }
  py::gil_scoped_acquire gil;
  py::object current = wrapped(value);
  bool changed = false;
  for (const auto& hook : *hooks) {
    PyObject* const argument = current.ptr();
    auto result = called(*hook, &argument, 1);
    if (!result.is_none() && !result.is(current)) {
      const auto was = current.is_none() ? at::Tensor() : THPVariable_Unpack(current.ptr());
      checked(result, was, *hook, kind, 0, 1);
      current = std::move(result);
      changed = true;
    }
  }
  return changed ? THPVariable_Unpack(current.ptr()) : value;
}

}  // namespace commhook
