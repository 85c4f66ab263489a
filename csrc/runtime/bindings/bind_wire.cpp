#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/bindings/bindings.h"
#include "runtime/wire/backend.h"
#include "runtime/wire/channel.h"
#include "runtime/wire/endpoint.h"
#include "runtime/wire/tls.h"
#include "runtime/wire/tunnel.h"

namespace py = pybind11;

namespace commhook {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using wire::Endpoint;
using wire::WireBackend;

// An endpoint that is closed at a moment that Python chooses, whoever else has it.
class PyEndpoint {
 public:
  explicit PyEndpoint(Endpoint::Options options)
      : endpoint_(std::make_shared<Endpoint>(std::move(options))) {}
  PyEndpoint(const PyEndpoint&) = delete;
  PyEndpoint& operator=(const PyEndpoint&) = delete;
  ~PyEndpoint() {
    const py::gil_scoped_release no_gil;  // the endpoint's thread may need it before it ends
    close();
  }

  std::shared_ptr<Endpoint> get() const {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(endpoint_ != nullptr, "WireEndpoint: it is closed");
    return endpoint_;
  }
  void close() {
    std::unique_lock lock(mutex_);
    const auto endpoint = std::move(endpoint_);
    lock.unlock();
  }
  std::map<std::string, uint64_t> counts() const {
    const auto counts = get()->counts();
    return {
        {"sent_bytes", counts.sent_bytes},       {"received_bytes", counts.received_bytes},
        {"sent_messages", counts.sent_messages}, {"received_messages", counts.received_messages},
        {"connections", counts.connections},     {"broken", counts.broken}};
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Endpoint> endpoint_;
};

}  // namespace

void bind_wire(py::module_& m) {
  m.def("tls_version", &wire::Tls::version);
  using wire::Failure;
  py::enum_<Failure::Kind>(m, "WireFailure")
      .value("ENDED", Failure::Kind::kEnded)
      .value("LOST", Failure::Kind::kLost)
      .value("TIMEOUT", Failure::Kind::kTimeout)
      .value("MISFIT", Failure::Kind::kMisfit)
      .value("TOLD", Failure::Kind::kTold)
      .value("LEFT", Failure::Kind::kLeft)
      .value("CLOSED", Failure::Kind::kClosed);
  // Not for constructors: pybind11 enters a new instance into its table while the guard lasts.
  using without_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<PyEndpoint>(m, "WireEndpoint")
      .def(py::init([](std::string host, std::string version, double lost_after, size_t rails,
                       const py::bytes& key) {
             // What no number of nanoseconds can be is refused below.
             const bool fits = lost_after >= 0 && lost_after < 1e9;
             const auto time = static_cast<wire::Time>(fits ? lost_after * wire::kSecond : 0);
             Endpoint::Options options{std::move(host), std::move(version), time, rails,
                                       std::string(key)};
             const py::gil_scoped_release no_gil;
             return std::make_unique<PyEndpoint>(std::move(options));
           }),
           py::arg("host") = "", py::arg("version") = "", py::arg("lost_after") = 15.0,
           py::arg("rails") = 1, py::arg("key") = py::bytes())
      .def_property_readonly("address",
                             [](const PyEndpoint& self) { return self.get()->address(); })
      .def("counts", &PyEndpoint::counts, without_gil())
      .def(
          "has_lost", [](const PyEndpoint& self) { return self.get()->has_lost(); }, without_gil())
      .def(
          "has_groups", [](const PyEndpoint& self) { return self.get()->has_groups(); },
          without_gil())
      .def(
          "cut", [](const PyEndpoint& self) { self.get()->cut(); }, without_gil())
      .def(
          "stop", [](const PyEndpoint& self) { self.get()->stop(); }, without_gil())
      .def("close", &PyEndpoint::close, without_gil());
  // A process has a tunnel until it ends, or closes it: a child of fork() has no thread to join.
  using wire::Tunnel;
  py::class_<Tunnel, std::unique_ptr<Tunnel, py::nodelete>>(m, "WireTunnel")
      .def(py::init([](int listener, const std::string& host, uint16_t port, const py::bytes& key,
                       bool is_client) {
             const std::string bytes = key;
             const py::gil_scoped_release no_gil;
             return new Tunnel(listener, host, port, bytes, is_client);
           }),
           py::arg("listener"), py::arg("host"), py::arg("port"), py::arg("key"),
           py::arg("is_client"))
      .def(
          "prove",
          [](const Tunnel& self, double timeout) {
            const double seconds = timeout >= 0 ? std::min(timeout, 1e9) : 0;
            self.prove(static_cast<wire::Time>(seconds * wire::kSecond), [] {
              const py::gil_scoped_acquire gil;
              if (PyErr_CheckSignals() != 0) {  // Ctrl-C
                throw py::error_already_set();
              }
            });
          },
          py::arg("timeout"), without_gil())
      .def("close", &Tunnel::close, without_gil());
  py::class_<wire::Exchanges, std::shared_ptr<wire::Exchanges>>(m, "WireExchanges")
      .def("reserve", &wire::Exchanges::reserve, py::arg("order") = 0, without_gil())
      .def("expect", &wire::Exchanges::expect, py::arg("outputs"), py::arg("place"),
           py::arg("stage"), py::arg("timeout"), py::arg("form") = "", without_gil())
      .def(
          "start",
          [](wire::Exchanges& self, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
             at::Tensor result, int64_t place, int64_t stage, std::chrono::milliseconds timeout,
             const std::string& form) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(
                self.start(std::move(inputs), std::move(outputs), std::move(result), place, stage,
                           timeout, form));
          },
          py::arg("inputs"), py::arg("outputs"), py::arg("result"), py::arg("place"),
          py::arg("stage"), py::arg("timeout"), py::arg("form") = "", without_gil())
      .def(
          "gather",
          [](wire::Exchanges& self, const std::vector<at::Tensor>& parts, at::Tensor result,
             int64_t place, std::chrono::milliseconds timeout, const std::string& form) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(
                self.gather(parts, std::move(result), place, timeout, form));
          },
          py::arg("parts"), py::arg("result"), py::arg("place"), py::arg("timeout"),
          py::arg("form") = "", without_gil())
      .def(
          "reduce",
          [](wire::Exchanges& self, const at::Tensor& tensor, bool takes_maximum, at::Tensor result,
             int64_t place, std::chrono::milliseconds timeout) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(
                self.reduce(tensor, takes_maximum, std::move(result), place, timeout));
          },
          py::arg("tensor"), py::arg("takes_maximum"), py::arg("result"), py::arg("place"),
          py::arg("timeout"), without_gil());
  const auto join = [](const PyEndpoint& endpoint, const Store& store, const std::string& name,
                       int rank, int size, std::chrono::milliseconds within,
                       std::vector<int64_t> names, bool is_held) {
    return wire::Channel::join(endpoint.get(), store, name, rank, size, within, std::move(names),
                               is_held);
  };
  py::class_<WireBackend, c10d::Backend, c10::intrusive_ptr<WireBackend>>(m, "WireBackend")
      .def(py::init([join](const PyEndpoint& endpoint, const Store& store, const std::string& name,
                           int rank, int size, std::chrono::milliseconds timeout,
                           std::optional<std::chrono::milliseconds> within,
                           std::vector<int64_t> names, bool is_held) {
             const py::gil_scoped_release no_gil;
             return WireBackend::make(join(endpoint, store, name, rank, size,
                                           within.value_or(timeout), std::move(names), is_held),
                                      timeout);
           }),
           py::arg("endpoint"), py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("size"),
           py::arg("timeout"), py::arg("within") = py::none(),
           py::arg("names") = std::vector<int64_t>(), py::arg("is_held") = false)
      .def(
          "join",
          [join](WireBackend& self, const PyEndpoint& endpoint, const Store& store,
                 const std::string& name, std::chrono::milliseconds within,
                 std::vector<int64_t> names, bool is_held) {
            self.use(join(endpoint, store, name, self.getRank(), self.getSize(), within,
                          std::move(names), is_held));
          },
          py::arg("endpoint"), py::arg("store"), py::arg("name"), py::arg("within"),
          py::arg("names") = std::vector<int64_t>(), py::arg("is_held") = false, without_gil())
      .def_property_readonly("options", [](WireBackend& self) { return self.getBackendOptions(); })
      .def("exchanges", &WireBackend::exchanges, without_gil())
      .def("fail", &WireBackend::fail, py::arg("why"), without_gil())
      .def("close", &WireBackend::close, py::arg("why") = "",
           py::arg("kind") = Failure::Kind::kLeft, py::arg("rank") = py::none(), without_gil())
      .def("drain", &WireBackend::drain, py::arg("longest"), without_gil())
      .def(
          "failure",
          [](WireBackend& self) {
            std::optional<std::tuple<Failure::Kind, int, std::string, std::string>> found;
            if (const auto failure = self.failure()) {
              found.emplace(failure->kind, failure->rank, failure->text, failure->why);
            }
            return found;
          },
          without_gil());
  WireBackend::bind_made(m);
}

}  // namespace commhook
