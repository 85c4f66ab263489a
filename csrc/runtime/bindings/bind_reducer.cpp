#include <memory>

#include "runtime/bindings/bindings.h"
#include "runtime/python/module_members.h"
#include "runtime/reducer/arrivals.h"
#include "runtime/reducer/ddp_detection.h"
#include "runtime/reducer/parameter_forms.h"
#include "runtime/reducer/parameter_hooks.h"
#include "runtime/reducer/reducer_bucket.h"
#include "runtime/reducer/reducer_run.h"

namespace py = pybind11;

namespace commhook {

void bind_reducer(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<ReducerBucket, std::shared_ptr<ReducerBucket>>(m, "ReducerBucket")
      .def(py::init<std::vector<at::Tensor>, bool, bool>(), py::arg("parameters"),
           py::arg("is_sparse"), py::arg("as_views"))
      .def("take_gradients", &ReducerBucket::take_gradients, py::arg("others") = py::none(),
           py::arg("apart") = false, no_gil)
      .def("gradients", &ReducerBucket::gradients)
      .def("drop_gradients", &ReducerBucket::drop_gradients)
      .def("gather", &ReducerBucket::gather, py::arg("scale"), no_gil)
      .def("flatten", &ReducerBucket::flatten, py::arg("scale"), py::arg("dtype"), py::arg("out"),
           no_gil)
      .def("write", &ReducerBucket::write, py::arg("result"), py::arg("scale") = 1.0,
           py::arg("into") = py::none(), no_gil);
  py::class_<ReducerRun, std::shared_ptr<ReducerRun>>(m, "ReducerRun")
      .def(py::init<std::shared_ptr<CppHook>, std::vector<std::shared_ptr<ReducerBucket>>,
                    std::vector<ProcessGroupPtr>>(),
           py::arg("hook").none(false), py::arg("buckets"), py::arg("groups"))
      .def_property_readonly("started", &ReducerRun::started)
      .def("finish", &ReducerRun::finish, py::arg("late"), py::arg("seconds"), no_gil)
      .def("drain", &ReducerRun::drain, py::arg("seconds"), no_gil)
      .def("bytes_sent", &ReducerRun::bytes_sent);
  py::class_<Arrivals, std::shared_ptr<Arrivals>>(m, "Arrivals")
      .def(py::init<py::object, int64_t>(), py::arg("listener"), py::arg("parameter_count"))
      .def("assign", &Arrivals::assign, py::arg("bucket_of"))
      .def("count_in_this_backward", &Arrivals::count_in_this_backward, py::arg("tell_full"),
           py::arg("run") = py::none())
      .def_property_readonly("touched", &Arrivals::touched)
      .def("reset", &Arrivals::reset)
      .def("close", &Arrivals::close)
      .def("missing", &Arrivals::missing)
      .def("take_order", &Arrivals::take_order)
      .def("stop_noting_order", &Arrivals::stop_noting_order);
  py::class_<ParameterForms, std::shared_ptr<ParameterForms>>(m, "ParameterForms")
      .def(py::init<std::vector<at::Tensor>, bool>(), py::arg("parameters"), py::arg("in_ddp"))
      .def("change", &ParameterForms::change)
      .def("clear", &ParameterForms::clear);
  m.def("module_members", &module_members, py::arg("model"));
  m.def("count_arrivals", &count_arrivals, py::arg("parameter"), py::arg("own_key"),
        py::arg("arrivals").none(false), py::arg("number"));
  m.def("stop_counting", &stop_counting, py::arg("parameter"));
  m.def("has_ddp_hook", &has_ddp_hook, py::arg("parameter"));
}

}  // namespace commhook
