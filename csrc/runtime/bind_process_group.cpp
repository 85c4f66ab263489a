#include <pybind11/chrono.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "runtime/bindings.h"
#include "runtime/broadcast_buckets.h"
#include "runtime/broadcast_coalesced.h"
#include "runtime/py_process_group.h"
#include "runtime/py_work.h"

namespace py = pybind11;

namespace commhook {
namespace {

py::dict names_by_method(const std::map<std::string, const PyMethod*>& methods) {
  py::dict names;
  for (const auto& [name, method] : methods) {
    names[py::str(name)] = method->names();
  }
  return names;
}

}  // namespace

void bind_process_group(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<PyProcessGroup, c10d::ProcessGroup, c10::intrusive_ptr<PyProcessGroup>>(
      m, "ProcessGroup", "A process group whose methods a Python class defines.")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("size"))
      .def(py::init<const c10::intrusive_ptr<c10d::Store>&, int, int>(), py::arg("store"),
           py::arg("rank"), py::arg("size"));
  py::class_<PyWork, c10d::Work, c10::intrusive_ptr<PyWork>>(m, "Work",
                                                             "Work that a Python class does.")
      .def(py::init<int, c10d::OpType>(), py::arg("rank") = -1,
           py::arg("op_type") = c10d::OpType::UNKNOWN)
      .def("abort", &PyWork::abort, no_gil)
      .def("synchronize", &PyWork::synchronize, no_gil)
      .def("exception",
           [](const PyWork& work) -> py::object {
             const auto error = work.exception();
             return error ? python_exception(error) : py::none();
           })
      .def("get_future_result",
           [](PyWork& work) {
             return std::make_shared<torch::jit::PythonFutureWrapper>(work.getFutureResult());
           })
      .def("get_duration", &PyWork::getDuration, no_gil)
      .def("get_sequence_number", &PyWork::getSequencenumber, no_gil);
  m.def("process_group_methods", [] { return names_by_method(PyProcessGroup::methods()); });
  m.def("work_methods", [] { return names_by_method(PyWork::methods()); });
  // What C++ does with a Work in Python: for tests, which have no other way to a holder.
  m.def(
      "held_work",
      [](const py::object& work) {
        return held_work(work.cast<c10::intrusive_ptr<c10d::Work>>(), work);
      },
      py::arg("work"));
  m.def(
      "broadcast_coalesced",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group,
         const std::vector<at::Tensor>& tensors, int64_t buffer_size,
         int64_t rank) { broadcast_coalesced(group, tensors, buffer_size, rank); },
      py::arg("process_group"), py::arg("tensors"), py::arg("buffer_size"), py::arg("rank"),
      no_gil);
  m.def(
      "broadcast_cut",
      [](const std::vector<int64_t>& sizes,
         int64_t element_size) -> std::optional<std::pair<int64_t, int64_t>> {
        const auto cut = cut_of(sizes, element_size);
        return cut ? std::optional(std::pair(cut->dim, cut->length)) : std::nullopt;
      },
      py::arg("sizes"), py::arg("element_size"));
  m.def(
      "broadcast_buckets",
      [](const std::vector<int64_t>& bytes, const std::vector<int64_t>& kinds,
         int64_t buffer_size) {
        TORCH_CHECK_VALUE(bytes.size() == kinds.size(),
                          "broadcast_buckets: kinds must be as many as bytes, ", bytes.size(),
                          ", got ", kinds.size());
        std::vector<std::vector<size_t>> indices;
        for (auto& bucket : make_buckets(bytes, kinds, buffer_size)) {
          indices.push_back(std::move(bucket.indices));
        }
        return indices;
      },
      py::arg("bytes"), py::arg("kinds"), py::arg("buffer_size"));
}

}  // namespace commhook
