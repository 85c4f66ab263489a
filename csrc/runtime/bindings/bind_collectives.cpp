#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/bindings/bindings.h"
#include "runtime/collectives/broadcast_buckets.h"
#include "runtime/collectives/broadcast_coalesced.h"

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
}

}  // namespace commhook
