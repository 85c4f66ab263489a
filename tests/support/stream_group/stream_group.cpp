// A process group for tensors on the CPU. It runs its collectives on a stream, as NCCL does.
//
// A collective enters the queue of the group's stream. Its Work and its Future are complete at
// once. The values come when the stream has run it, which takes a while. The streams belong to a
// device without memory (PrivateUse1). The host itself stands for every other stream of that
// device: it runs work immediately, and waits where a stream would.

#include <c10/core/StreamGuard.h>
#include <torch/extension.h>

#include <chrono>
#include <thread>

#include "../host_streams/group.h"
#include "../host_streams/streams.h"

namespace {

using namespace host_streams;

const c10::StreamId kHost = new_host_stream();
const c10::StreamId kPool = new_host_stream();  // for callbacks

struct HostGuard final : Guard {
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_with(kPool);
  }
  void block(void* event, const c10::Stream&) const override {
    const auto& recorded = *static_cast<Event*>(event);
    if (recorded.queue != nullptr) {
      recorded.queue->reach(recorded.place);
      const auto error = recorded.queue->error();
      TORCH_CHECK(error.empty(), "stream_group: a collective failed: ", error);
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, HostGuard);

// An empty storage of the device, which a Future needs to record its event.
const c10::Storage& storage() {
  static auto& only = *new c10::Storage(c10::Storage::use_byte_size_t(), 0,
                                        c10::DataPtr(nullptr, kDevice), nullptr, false);
  return only;
}

class CompleteWork final : public FutureWork {
 public:
  CompleteWork(Tensors outputs, c10::StreamId stream)
      : FutureWork(std::move(outputs), std::vector{kDevice}) {
    const c10::StreamGuard guard(stream_with(stream));
    future_->markCompleted(c10::IValue(outputs_), std::vector{storage().getWeakStorageImpl()});
  }
};

class HostGroup final : public StreamGroup {
 public:
  HostGroup(c10::intrusive_ptr<c10d::Backend> gloo, double delay, std::string name)
      : StreamGroup(std::move(gloo)),
        delay_(delay),
        name_(std::move(name)),
        stream_(new_stream()) {}
  ~HostGroup() override { queue_of(stream_).close(); }

  const std::string getBackendName() const override { return name_; }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return put(outputs, [=](c10d::Backend& gloo) mutable {
      return gloo.allgather_into_tensor_coalesced(outputs, inputs, opts);
    });
  }

 private:
  WorkPtr put(Tensors outputs, Collective collective) override {
    queue_of(stream_).add([gloo = gloo_, delay = delay_, collective = std::move(collective)] {
      std::this_thread::sleep_for(delay);
      collective(*gloo)->wait();
    });
    return c10::make_intrusive<CompleteWork>(std::move(outputs), stream_);
  }

  const std::chrono::duration<double> delay_;
  const std::string name_;
  const c10::StreamId stream_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  TORCH_INTERNAL_ASSERT(kHost == kDefault);
  m.def("around", [](c10::intrusive_ptr<c10d::Backend> gloo, double delay, std::string name) {
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<HostGroup>(std::move(gloo), delay, std::move(name)));
  });
}
