// A process group that runs its collectives on a stream, as NCCL does, by means of Gloo.
#pragma once

#include <chrono>
#include <functional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "streams.h"

namespace host_streams {

using c10::ivalue::Future;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Collective = std::function<WorkPtr(c10d::Backend&)>;

// wait() waits for the Future.
class FutureWork : public c10d::Work {
 public:
  // devices: those of the Future.
  FutureWork(Tensors outputs, std::vector<c10::Device> devices)
      : future_(c10::make_intrusive<Future>(c10::ListType::ofTensors(), std::move(devices))),
        outputs_(std::move(outputs)) {}
  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    future_->wait();
    return true;
  }
  void synchronize() override { future_->wait(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }

 protected:
  const c10::intrusive_ptr<Future> future_;
  const Tensors outputs_;
};

// Expresses each collective by functions that put one on the stream.
class StreamGroup : public c10d::Backend {
 public:
  explicit StreamGroup(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "streams"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto host = on_host_all(tensors);
    return put(tensors, [=](c10d::Backend& gloo) mutable { return gloo.broadcast(host, opts); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto host = on_host_all(tensors);
    return in_place(tensors,
                    [=](c10d::Backend& gloo) mutable { return gloo.allreduce(host, opts); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    auto host = on_host_all(tensors);
    return in_place(
        tensors, [=](c10d::Backend& gloo) mutable { return gloo.allreduce_coalesced(host, opts); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    std::vector<Tensors> to{on_host_all(outputs[0])};
    auto from = on_host_all(inputs);
    return to_others(outputs[0], from,
                     [=](c10d::Backend& gloo) mutable { return gloo.allgather(to, from, opts); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    auto to = on_host(output), from = on_host(input);
    return to_others({output}, {from}, [=](c10d::Backend& gloo) mutable {
      return gloo._allgather_base(to, from, opts);
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& opts) override {
    auto to = on_host(output), from = on_host(input);
    return to_others({output}, {from}, [=](c10d::Backend& gloo) mutable {
      return gloo.alltoall_base(to, from, output_sizes, input_sizes, opts);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return put({}, [=](c10d::Backend& gloo) { return gloo.barrier(opts); });
  }

 protected:
  virtual WorkPtr put(Tensors outputs, Collective collective) = 0;
  // Puts a collective that writes its inputs.
  virtual WorkPtr in_place(const Tensors& tensors, Collective collective) {
    return put(tensors, std::move(collective));
  }
  // Puts a collective that usually reads other memory than it writes; an output may hold the input.
  virtual WorkPtr to_others(const Tensors& outputs, const Tensors&, Collective collective) {
    return put(outputs, std::move(collective));
  }
  // A tensor on the host that shares another one's memory.
  virtual at::Tensor on_host(const at::Tensor& tensor) const { return tensor; }

  Tensors on_host_all(const Tensors& tensors) const {
    Tensors result;
    for (const auto& each : tensors) {
      result.push_back(on_host(each));
    }
    return result;
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace host_streams
