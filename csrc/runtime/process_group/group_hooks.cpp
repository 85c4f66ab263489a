#include "runtime/process_group/group_hooks.h"

#if COMMHOOK_TORCH_AT_LEAST(2, 14)

#include <torch/csrc/jit/python/pybind_utils.h>

#include <utility>

#include "runtime/process_group/py_override.h"

namespace py = pybind11;

namespace commhook {
namespace {

const PyMethod kPostHook{"post_hook"};

// torch_commhook.process_group.HookOpName has the values of torch 2.15.
c10d::HookOpName operation(const py::object& args) {
  const int value = args.attr("name").attr("value").cast<int>();
#if !COMMHOOK_TORCH_AT_LEAST(2, 15)
  // All variants of a collective have the name of the plain one.
  using Name = c10d::HookOpName;
  static constexpr Name plain[] = {Name::ALLREDUCE, Name::ALLGATHER,      Name::ALLGATHER,
                                   Name::ALLGATHER, Name::REDUCE_SCATTER, Name::REDUCE_SCATTER,
                                   Name::ALLTOALL};
  constexpr int first = static_cast<int>(Name::NEW_WINDOW) + 1;
  if (value >= first) {
    const auto place = static_cast<size_t>(value - first);
    return place < std::size(plain) ? plain[place] : Name::UNKNOWN;
  }
#endif
  return static_cast<c10d::HookOpName>(value);
}

c10::intrusive_ptr<c10d::Work> work_of(const py::object& args) {
  const py::object work = args.attr("work");
  if (work.is_none()) {
    return nullptr;
  }
  return Returned<c10::intrusive_ptr<c10d::Work>>::from(work, {args, kPostHook});
}

template <typename Args, typename Hook, typename Convert>
py::object converting(Hook hook, Convert convert) {
  return py::cpp_function([hook = std::move(hook), convert](const py::object& args) {
    const Args converted = convert(args);
    py::gil_scoped_release no_gil;
    hook(converted);
  });
}

}  // namespace

py::object python_hook(c10d::PreHook hook) {
  return converting<c10d::PreHookArgs>(std::move(hook), [](const py::object& args) {
    c10d::PreHookArgs converted;
    converted.name = operation(args);
    converted.async_op = args.attr("async_op").cast<bool>();
    converted.input_tensors = args.attr("input_tensors").cast<std::vector<at::Tensor>>();
    converted.output_tensors = args.attr("output_tensors").cast<std::vector<at::Tensor>>();
    converted.root = args.attr("root").cast<int64_t>();
    converted.op_id = args.attr("op_id").cast<int64_t>();
    return converted;
  });
}

py::object python_hook(c10d::PostHook hook) {
  return converting<c10d::PostHookArgs>(std::move(hook), [](const py::object& args) {
    c10d::PostHookArgs converted;
    converted.name = operation(args);
    converted.async_op = args.attr("async_op").cast<bool>();
    converted.work = work_of(args);
    converted.op_id = args.attr("op_id").cast<int64_t>();
    return converted;
  });
}

py::object python_hook(c10d::AbortHook hook) {
  return py::cpp_function(std::move(hook), py::call_guard<py::gil_scoped_release>());
}

#if COMMHOOK_TORCH_AT_LEAST(2, 15)
py::object python_hook(c10d::CompletionHook hook) {
  return py::cpp_function([hook = std::move(hook)](const py::object& args) {
    if (!args.attr("error").is_none()) {
      return;
    }
    c10d::CompletionHookArgs converted;
    converted.completionKey = args.attr("completion_key").cast<uint64_t>();
    converted.duration_ms = args.attr("duration_ms").cast<float>();
    py::gil_scoped_release no_gil;
    hook(converted);
  });
}
#endif

}  // namespace commhook

#endif
