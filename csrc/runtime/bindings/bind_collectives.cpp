#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/bindings/bindings.h"
#include "runtime/collectives/broadcast_buckets.h"
#include "runtime/collectives/broadcast_coalesced.h"
#include "runtime/collectives/exchanges.h"

namespace py = pybind11;

namespace commhook {

void bind_collectives(py::module_& m) {
  m.def(
      "broadcast_coalesced",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group,
         const std::vector<at::Tensor>& tensors, int64_t buffer_size,
         int64_t rank) { broadcast_coalesced(group, tensors, buffer_size, rank); },
      py::arg("process_group"), py::arg("tensors"), py::arg("buffer_size"), py::arg("rank"),
      py::call_guard<py::gil_scoped_release>());
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
                          "broadcast_buckets: kinds must have the length of bytes, ", bytes.size(),
                          ", got ", kinds.size());
        std::vector<std::vector<size_t>> indices;
        for (auto& bucket : make_buckets(bytes, kinds, buffer_size)) {
          indices.push_back(std::move(bucket.indices));
        }
        return indices;
      },
      py::arg("bytes"), py::arg("kinds"), py::arg("buffer_size"));
  m.def(
      "ask_early",
      [](const Exchanges::Group& group, const at::Tensor& output, int rank, int tag) {
        return ask_early(group, output, rank, tag);
      },
      py::arg("group"), py::arg("output"), py::arg("rank"), py::arg("tag"),
      py::call_guard<py::gil_scoped_release>());
  py::class_<Exchanges, std::shared_ptr<Exchanges>>(m, "Exchanges")
      .def(py::init<const Exchanges::Group&, const Exchanges::Group&, bool, std::vector<int64_t>>(),
           py::arg("up"), py::arg("down"), py::arg("is_second"),
           py::arg("names") = std::vector<int64_t>())
      .def(
          "start",
          [](Exchanges& self, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
             at::Tensor result, std::optional<int64_t> place, int64_t stage) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(
                self.start(std::move(inputs), std::move(outputs), std::move(result),
                           place ? *place : self.reserve(), stage));
          },
          py::arg("inputs"), py::arg("outputs"), py::arg("result"), py::arg("place") = py::none(),
          py::arg("stage") = 0, py::call_guard<py::gil_scoped_release>())
      .def("expect", &Exchanges::expect, py::arg("outputs"), py::arg("place"), py::arg("stage") = 0,
           py::call_guard<py::gil_scoped_release>())
      .def("reserve", &Exchanges::reserve, py::call_guard<py::gil_scoped_release>())
      .def("use_down", &Exchanges::use_down, py::arg("down"),
           py::call_guard<py::gil_scoped_release>())
      .def("use_more", &Exchanges::use_more, py::arg("ups"), py::arg("downs"),
           py::call_guard<py::gil_scoped_release>())
      .def("finish_messages", &Exchanges::finish_messages, py::arg("ranks"), py::arg("works"),
           py::call_guard<py::gil_scoped_release>())
      .def("finish", &Exchanges::finish, py::call_guard<py::gil_scoped_release>())
      .def("stop", &Exchanges::stop, py::call_guard<py::gil_scoped_release>());
}

}  // namespace commhook
