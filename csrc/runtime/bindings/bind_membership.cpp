#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/bindings/bindings.h"
#include "runtime/membership/signs_of_life.h"

namespace py = pybind11;

namespace commhook {

void bind_membership(py::module_& m) {
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  py::class_<SignsOfLife, std::shared_ptr<SignsOfLife>>(m, "SignsOfLife")
      .def(py::init<StorePtr, std::string, double>(), py::arg("store"), py::arg("own"),
           py::arg("interval"), py::call_guard<py::gil_scoped_release>())
      .def("watch", &SignsOfLife::watch, py::arg("keys"), py::call_guard<py::gil_scoped_release>())
      .def(
          "signs",
          [](const SignsOfLife& self) {
            std::map<std::string, std::pair<int64_t, double>> found;
            for (const auto& [key, sign] : self.signs()) {
              found[key] = {sign.number, sign.seconds};
            }
            return found;
          },
          py::call_guard<py::gil_scoped_release>())
      .def("seconds_without_store", &SignsOfLife::seconds_without_store,
           py::call_guard<py::gil_scoped_release>())
      .def("stop", &SignsOfLife::stop, py::call_guard<py::gil_scoped_release>());
}

}  // namespace commhook
