#include "runtime/exchanges.h"

#include <algorithm>
#include <exception>
#include <utility>

using c10::ivalue::Future;

namespace commhook {
namespace {

// Far from those that people use on the same group.
constexpr uint32_t kFirstTag = 1U << 30;

constexpr const char* kStopped = "exchange: the process group was closed (gloo)";

bool are_messages(const std::vector<at::Tensor>& messages, int64_t size) {
  return static_cast<int64_t>(messages.size()) == size &&
         std::all_of(messages.begin(), messages.end(), [](const at::Tensor& message) {
           return message.defined() && message.dim() == 1 && message.device().is_cpu() &&
                  message.scalar_type() == at::kByte && message.is_contiguous();
         });
}

std::exception_ptr wait_for_all(const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  std::exception_ptr error;
  for (const auto& work : works) {
    try {
      TORCH_CHECK(work->wait(), kStopped);
    } catch (...) {
      error = error ? error : std::current_exception();
    }
  }
  return error;
}

}  // namespace

int Exchanges::next_tag() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!stopped_, kStopped);
  const uint32_t count = count_++ % (kFirstTag / 2);
  return static_cast<int>(kFirstTag + 2 * count + (is_second_ ? 1 : 0));
}

c10::intrusive_ptr<Future> Exchanges::start(const Group& up, const Group& down,
                                            const std::vector<at::Tensor>& inputs,
                                            const std::vector<at::Tensor>& outputs,
                                            const at::Tensor& result) {
  TORCH_CHECK_VALUE(up && down, "exchange: there must be process groups");
  const int size = up->getSize();
  const int rank = up->getRank();
  TORCH_CHECK_VALUE(down->getSize() == size && down->getRank() == rank,
                    "exchange: both process groups must have the same ranks");
  TORCH_CHECK_VALUE(are_messages(inputs, size) && are_messages(outputs, size),
                    "exchange: there must be flat bytes on the CPU for each rank");
  Exchange exchange{{}, c10::make_intrusive<Future>(c10::TensorType::get()), result};
  auto done = exchange.done;
  const int tag = next_tag();
  // What is to come is asked for first: then no message has to wait for that.
  for (int distance = 1; distance < size; ++distance) {
    const int from = (rank + size - distance) % size;
    std::vector<at::Tensor> received{outputs[from]};
    if (received[0].numel() != 0) {
      exchange.works.push_back((from < rank ? up : down)->recv(received, from, tag));
    }
  }
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank + distance) % size;
    std::vector<at::Tensor> sent{inputs[to]};
    if (sent[0].numel() != 0) {
      exchange.works.push_back((rank < to ? up : down)->send(sent, to, tag));
    }
  }
  if (exchange.works.empty()) {
    done->markCompleted(result);
  } else {
    add(std::move(exchange));
  }
  return done;
}

void Exchanges::add(Exchange exchange) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!stopped_, kStopped);
  if (runner_ == std::thread::id()) {
    std::thread runner([self = shared_from_this()] { self->run(); });
    runner_ = runner.get_id();
    runner.detach();  // who waits for its end calls stop()
  }
  under_way_.push_back(std::move(exchange));
}

void Exchanges::run() {
  std::unique_lock lock(mutex_);
  while (!under_way_.empty()) {
    const Works works = under_way_.front().works;
    lock.unlock();
    const std::exception_ptr error = wait_for_all(works);
    lock.lock();
    Exchange exchange = std::move(under_way_.front());
    under_way_.pop_front();
    exchange.works.clear();
    lock.unlock();
    if (error) {
      exchange.done->setError(error);
    } else {
      exchange.done->markCompleted(exchange.result);
    }
    exchange = {};
    lock.lock();
  }
  runner_ = {};
  ended_.notify_all();
}

void Exchanges::stop() {
  std::unique_lock lock(mutex_);
  stopped_ = true;
  for (const auto& exchange : under_way_) {
    for (const auto& work : exchange.works) {
      work->abort();
    }
  }
  if (runner_ != std::this_thread::get_id()) {
    ended_.wait(lock, [this] { return runner_ == std::thread::id(); });
  }
}

}  // namespace commhook
