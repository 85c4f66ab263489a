// A process group whose collectives run on a stream, as NCCL's do, for tensors on the CPU.
//
// A collective is put into the queue of the group's stream. Its Work and its Future are complete at
// once. The values are there when the stream has run it, which takes a while. The streams are those
// of a device without memory (PrivateUse1). The host itself is every other stream of that device:
// it runs what it is given at once, and waits where a stream would.

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace {

using c10::ivalue::Future;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

const c10::Device kDevice(c10::kPrivateUse1, 0);
constexpr c10::StreamId kHost = 0;
constexpr c10::StreamId kPool = 1;  // of callbacks, which the host runs too

// A stream: its thread runs one task after another.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  int64_t put = 0;
  int64_t done = 0;
  std::string error;
  bool closed = false;

  int64_t end() {
    const std::lock_guard lock(mutex);
    return put;
  }

  bool has_run(int64_t task) {
    const std::lock_guard lock(mutex);
    return done >= task;
  }

  void wait_for(int64_t task) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= task; });
    TORCH_CHECK(error.empty(), "stream_group: a collective failed: ", error);
  }

  void add(std::function<void()> task) {
    const std::lock_guard lock(mutex);
    tasks.push_back(std::move(task));
    ++put;
    changed.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closed || !tasks.empty(); });
      if (tasks.empty()) {
        return;
      }
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      std::string failed;
      try {
        task();
      } catch (const std::exception& raised) {
        failed = raised.what();
      }
      lock.lock();
      error = error.empty() ? failed : error;
      ++done;
      changed.notify_all();
    }
  }
};

std::mutex queues_mutex;
std::map<c10::StreamId, std::shared_ptr<Queue>>& queues =
    *new std::map<c10::StreamId, std::shared_ptr<Queue>>;

std::shared_ptr<Queue> queue_of(c10::StreamId stream) {
  const std::lock_guard lock(queues_mutex);
  const auto found = queues.find(stream);
  return found == queues.end() ? nullptr : found->second;
}

struct Event {
  std::shared_ptr<Queue> queue;
  int64_t task = 0;
};

c10::Stream stream_with(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

thread_local c10::StreamId current = kHost;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_with(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_with(kHost); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_with(kPool);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_with(std::exchange(current, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    auto& recorded = *static_cast<Event*>(*event);
    recorded.queue = queue_of(stream.id());
    recorded.task = recorded.queue ? recorded.queue->end() : 0;
  }
  void block(void* event, const c10::Stream&) const override {
    const auto& recorded = *static_cast<Event*>(event);
    if (recorded.queue) {
      recorded.queue->wait_for(recorded.task);
    }
  }
  bool queryEvent(void* event) const override {
    const auto& recorded = *static_cast<Event*>(event);
    return !recorded.queue || recorded.queue->has_run(recorded.task);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Memory of the device, without any: a Future records its event for this.
const c10::Storage& storage() {
  static auto& only = *new c10::Storage(c10::Storage::use_byte_size_t(), 0,
                                        c10::DataPtr(nullptr, kDevice), nullptr, false);
  return only;
}

class StreamWork final : public c10d::Work {
 public:
  StreamWork(Tensors outputs, c10::StreamId stream)
      : future_(c10::make_intrusive<Future>(c10::ListType::ofTensors(), std::vector{kDevice})),
        outputs_(std::move(outputs)) {
    const c10::StreamGuard guard(stream_with(stream));
    future_->markCompleted(c10::IValue(outputs_), std::vector{storage().getWeakStorageImpl()});
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    future_->wait();
    return true;
  }
  void synchronize() override { future_->wait(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }

 private:
  const c10::intrusive_ptr<Future> future_;
  const Tensors outputs_;
};

class StreamGroup final : public c10d::Backend {
 public:
  StreamGroup(c10::intrusive_ptr<c10d::Backend> gloo, double delay)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        delay_(delay),
        queue_(std::make_shared<Queue>()) {
    const std::lock_guard lock(queues_mutex);
    static c10::StreamId last = kPool;
    stream_ = ++last;
    queues[stream_] = queue_;
    std::thread([queue = queue_] { queue->run(); }).detach();
  }
  ~StreamGroup() override {
    const std::lock_guard lock(queue_->mutex);
    queue_->closed = true;
    queue_->changed.notify_all();
  }

  const std::string getBackendName() const override { return "streams"; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return put(tensors, [=](c10d::Backend& gloo) mutable { return gloo.broadcast(tensors, opts); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return put(tensors, [=](c10d::Backend& gloo) mutable { return gloo.allreduce(tensors, opts); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return put(tensors, [=](c10d::Backend& gloo) mutable {
      return gloo.allreduce_coalesced(tensors, opts);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    return put(outputs[0],
               [=](c10d::Backend& gloo) mutable { return gloo.allgather(outputs, inputs, opts); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    return put({output}, [=](c10d::Backend& gloo) mutable {
      return gloo._allgather_base(output, input, opts);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return put(outputs, [=](c10d::Backend& gloo) mutable {
      return gloo.allgather_into_tensor_coalesced(outputs, inputs, opts);
    });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& opts) override {
    return put({output}, [=](c10d::Backend& gloo) mutable {
      return gloo.alltoall_base(output, input, output_sizes, input_sizes, opts);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return put({}, [=](c10d::Backend& gloo) { return gloo.barrier(opts); });
  }

 private:
  WorkPtr put(Tensors outputs, std::function<WorkPtr(c10d::Backend&)> collective) {
    queue_->add([gloo = gloo_, delay = delay_, collective = std::move(collective)] {
      std::this_thread::sleep_for(delay);
      collective(*gloo)->wait();
    });
    return c10::make_intrusive<StreamWork>(std::move(outputs), stream_);
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::chrono::duration<double> delay_;
  const std::shared_ptr<Queue> queue_;
  c10::StreamId stream_ = kHost;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("around", [](c10::intrusive_ptr<c10d::Backend> gloo, double delay) {
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<StreamGroup>(std::move(gloo), delay));
  });
}
