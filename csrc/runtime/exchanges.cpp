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

std::exception_ptr wait_for(const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  try {
    for (const auto& work : works) {
      TORCH_CHECK(work->wait(), kStopped);
    }
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

int Exchanges::next_tag(int size) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!stopped_, kStopped);
  if (lanes_.empty()) {
    lanes_ = std::vector<Lane>(size);
  }
  TORCH_CHECK_VALUE(lanes_.size() == static_cast<size_t>(size),
                    "exchange: the process groups must have ", lanes_.size(), " ranks, got ", size);
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
  auto done = c10::make_intrusive<Future>(c10::TensorType::get());
  const int tag = next_tag(size);
  std::vector<std::pair<int, Works>> parts;
  try {
    // What is to come is asked for first: then no message has to wait for that.
    for (int distance = 1; distance < size; ++distance) {
      const int from = (rank + size - distance) % size;
      Works works;
      std::vector<at::Tensor> received{outputs[from]};
      if (received[0].numel() != 0) {
        works.push_back((from < rank ? up : down)->recv(received, from, tag));
      }
      parts.emplace_back(from, std::move(works));
    }
    for (auto& [to, works] : parts) {
      std::vector<at::Tensor> sent{inputs[to]};
      if (sent[0].numel() != 0) {
        works.push_back((rank < to ? up : down)->send(sent, to, tag));
      }
    }
  } catch (...) {  // connections that have failed before, which other collectives tell so too
    done->setError(std::current_exception());
    return done;
  }
  parts.erase(std::remove_if(parts.begin(), parts.end(),
                             [](const auto& part) { return part.second.empty(); }),
              parts.end());
  if (parts.empty()) {
    done->markCompleted(result);
  } else {
    const size_t missing = parts.size();
    add(std::move(parts), {done, result, missing});
  }
  return done;
}

void Exchanges::add(std::vector<std::pair<int, Works>> parts, Exchange exchange) {
  const auto shared = std::make_shared<Exchange>(std::move(exchange));
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!stopped_, kStopped);  // meanwhile
  for (auto& [rank, works] : parts) {
    Lane& lane = lanes_[rank];
    if (lane.runner == std::thread::id()) {
      std::thread runner([self = shared_from_this(), &lane] { self->run(lane); });
      lane.runner = runner.get_id();
      runner.detach();  // who waits for its end calls stop()
    }
    lane.under_way.emplace_back(std::move(works), shared);
  }
}

void Exchanges::run(Lane& lane) {
  std::unique_lock lock(mutex_);
  while (!lane.under_way.empty()) {
    Works works = lane.under_way.front().first;  // stop() finds them in their place
    lock.unlock();
    const std::exception_ptr error = wait_for(works);
    works.clear();
    lock.lock();
    auto exchange = std::move(lane.under_way.front().second);
    lane.under_way.pop_front();
    --exchange->missing;
    const bool ends = !exchange->ended && (error || exchange->missing == 0);
    exchange->ended = exchange->ended || ends;
    lock.unlock();
    if (ends && error) {
      exchange->done->setError(error);
    } else if (ends) {
      exchange->done->markCompleted(exchange->result);
    }
    exchange.reset();
    lock.lock();
  }
  lane.runner = {};
  ended_.notify_all();
}

void Exchanges::stop() {
  std::unique_lock lock(mutex_);
  stopped_ = true;
  for (const auto& lane : lanes_) {
    for (const auto& [works, exchange] : lane.under_way) {
      for (const auto& work : works) {
        work->abort();
      }
    }
  }
  ended_.wait(lock, [this] {
    return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
      return lane.runner == std::thread::id() || lane.runner == std::this_thread::get_id();
    });
  });
}

}  // namespace commhook
