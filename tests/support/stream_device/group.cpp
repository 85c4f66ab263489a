// A process group for tensors of the device. It runs its collectives on a stream, as NCCL does.
//
// A collective waits for the current work of the current stream, then for a while, and runs over
// Gloo. Its Future is complete at once, and a stream that waits for the Future waits for the
// values. Until the collective is done, its outputs hold bytes of 0xFF, which are NaN.

#include "../host_streams/group.h"

#include <c10/core/StreamGuard.h>
#include <torch/extension.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "device.h"

namespace stream_device {
namespace {

std::atomic<int64_t> issued{0};
std::atomic<bool> is_held{false};  // collectives wait until it is false

void spoil(const at::Tensor& tensor) {
  at::from_blob(tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())}, at::kByte).fill_(0xff);
}

class DeviceWork final : public FutureWork {
 public:
  DeviceWork(Tensors outputs, c10::StreamId stream)
      : FutureWork(std::move(outputs), std::vector{kDevice}),
        queue_(queue_of(stream)),
        end_(queue_.end()) {
    const c10::StreamGuard guard(stream_with(stream));
    future_->markCompleted(c10::IValue(outputs_));
  }
  bool isCompleted() override { return queue_.has_run(end_); }

 private:
  Queue& queue_;
  const int64_t end_;
};

class DeviceGroup final : public StreamGroup {
 public:
  DeviceGroup(c10::intrusive_ptr<c10d::Backend> gloo, double delay)
      : StreamGroup(std::move(gloo)), delay_(delay), stream_(new_stream()) {}

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto host = on_host_all(tensors);
    return in_place(tensors, [=](c10d::Backend& gloo) mutable { return gloo.reduce(host, opts); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    auto to = on_host(output), from = on_host(input);
    return to_others({output}, {from}, [=](c10d::Backend& gloo) mutable {
      return gloo._reduce_scatter_base(to, from, opts);
    });
  }

 private:
  at::Tensor on_host(const at::Tensor& tensor) const override {
    return stream_device::on_host(tensor);
  }

  WorkPtr in_place(const Tensors& tensors, Collective collective) override {
    const auto host = on_host_all(tensors);
    return put_between(tensors, std::move(collective),
                       [host, own = std::make_shared<Tensors>()](bool before) {
                         for (size_t i = 0; i < host.size(); ++i) {
                           if (host[i].layout() != at::kStrided) {
                             continue;
                           }
                           if (before) {
                             own->push_back(host[i].clone());
                             spoil(host[i]);
                           } else {
                             host[i].copy_((*own)[i]);
                           }
                         }
                       });
  }

  WorkPtr to_others(const Tensors& outputs, const Tensors& inputs, Collective collective) override {
    const auto host = on_host_all(outputs);
    for (const auto& output : outputs) {
      for (const auto& input : inputs) {
        const auto* const begin = static_cast<const char*>(output.const_data_ptr());
        const auto* const place = static_cast<const char*>(input.const_data_ptr());
        if (place >= begin && place < begin + output.nbytes()) {
          return put(outputs, std::move(collective));
        }
      }
    }
    return put_between(outputs, std::move(collective), [host](bool before) {
      if (before) {
        for (const auto& each : host) {
          spoil(each);
        }
      }
    });
  }

  WorkPtr put(Tensors outputs, Collective collective) override {
    return put_between(std::move(outputs), std::move(collective), [](bool) {});
  }

  // Calls `around` with true, waits, calls it with false, and runs the collective.
  WorkPtr put_between(Tensors outputs, Collective collective, std::function<void(bool)> around) {
    ++issued;
    auto& before = queue_of(current());
    auto& own = queue_of(stream_);
    own.add([=, &before, place = before.end(), gloo = gloo_, delay = delay_] {
      before.reach(place);
      around(true);
      std::this_thread::sleep_for(delay);
      is_held.wait(true);
      around(false);
      collective(*gloo)->wait();
    });
    return c10::make_intrusive<DeviceWork>(std::move(outputs), stream_);
  }

  const std::chrono::duration<double> delay_;
  const c10::StreamId stream_;
};

// A group without streams, such as Gloo's for tensors on CUDA: threads of the host sum copies. Its
// Future names no device, and completes when the copies back are in the queue.
class StagedWork final : public FutureWork {
 public:
  StagedWork(Tensors outputs, c10::StreamId stream)
      : FutureWork(std::move(outputs), {}), queue_(queue_of(stream)) {}
  void queued() { future_->markCompleted(c10::IValue(outputs_)); }
  bool wait(std::chrono::milliseconds) override {
    future_->wait();
    queue_of(current()).add([&queue = queue_, end = queue_.end()] { queue.reach(end); });
    return true;
  }

 private:
  Queue& queue_;
};

class StagedGroup final : public c10d::Backend {
 public:
  StagedGroup(c10::intrusive_ptr<c10d::Backend> gloo, double delay)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        delay_(delay),
        host_(new_stream()),
        copies_(new_stream()) {}

  const std::string getBackendName() const override { return "staged"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return put(tensors,
               [=](c10d::Backend& gloo, Tensors& own) { return gloo.allreduce(own, opts); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return put(tensors,
               [=](c10d::Backend& gloo, Tensors& own) { return gloo.broadcast(own, opts); });
  }

 private:
  WorkPtr put(const Tensors& tensors, std::function<WorkPtr(c10d::Backend&, Tensors&)> collective) {
    auto work = c10::make_intrusive<StagedWork>(tensors, copies_);
    auto& before = queue_of(current());
    queue_of(host_).add([=, &before, place = before.end(), gloo = gloo_, delay = delay_,
                         &copies = queue_of(copies_), target = on_host(tensors.at(0))] {
      before.reach(place);
      Tensors own{target.clone()};
      spoil(target);
      collective(*gloo, own)->wait();
      copies.add([=] {
        std::this_thread::sleep_for(delay);
        target.copy_(own[0]);
      });
      work->queued();
    });
    return work;
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::chrono::duration<double> delay_;
  const c10::StreamId host_, copies_;
};

}  // namespace
}  // namespace stream_device

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace stream_device;
  without_gil = [](const std::function<void()>& function) {
    std::optional<pybind11::gil_scoped_release> released;
    if (PyGILState_Check() != 0) {
      released.emplace();
    }
    function();
  };
  m.def("around", [](c10::intrusive_ptr<c10d::Backend> gloo, double delay) {
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<DeviceGroup>(std::move(gloo), delay));
  });
  m.def("staged", [](c10::intrusive_ptr<c10d::Backend> gloo, double delay) {
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<StagedGroup>(std::move(gloo), delay));
  });
  m.def("sleep", [](double seconds) {  // delays the current stream
    queue_of(current()).add(
        [pause = std::chrono::duration<double>(seconds)] { std::this_thread::sleep_for(pause); });
  });
  m.def("use_cpu_kernels", &use_cpu_kernels);
  // From now on collectives end only after the next release().
  m.def("hold", [] { is_held = true; });
  m.def("release", [] {
    is_held = false;
    is_held.notify_all();
  });
  m.def("issued", [] { return issued.load(); });
}
