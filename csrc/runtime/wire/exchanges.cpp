#include "runtime/wire/exchanges.h"

#include <algorithm>
#include <functional>

#include "runtime/wire/patterns.h"

namespace commhook::wire {
namespace {

using c10::ivalue::Future;

constexpr int64_t kStages = 2;
// In the stage of a message, so that no collective of the backend has the same.
constexpr uint32_t kOfExchange = uint32_t{1} << 30;
constexpr uint32_t kOfPattern = uint32_t{1} << 29;
constexpr int64_t kNumbers = int64_t{1} << 32;

PeerError error_of_another_step(int rank) {
  return PeerError({Failure::Kind::kClosed, rank, "exchange: its step has failed"});
}

}  // namespace

// The receives of an exchange, or its sends, or both.
struct Exchanges::Part {
  std::mutex mutex;
  bool is_over = false;
  std::exception_ptr error;
  std::function<void(std::exception_ptr)> then;

  void end(std::exception_ptr found) {
    std::unique_lock lock(mutex);
    is_over = true;
    error = std::move(found);
    const auto next = std::move(then);
    lock.unlock();
    if (next) {
      next(error);
    }
  }

  void when_over(std::function<void(std::exception_ptr)> next) {
    std::unique_lock lock(mutex);
    if (!is_over) {
      then = std::move(next);
      return;
    }
    lock.unlock();
    next(error);
  }
};

int64_t Exchanges::reserve(int64_t order) {
  TORCH_CHECK_VALUE(order >= 0 && order < kOrders, "exchange: order must be 0 to ", kOrders - 1,
                    ", got ", order);
  return generation_ * kNumbers + order * (kNumbers / kOrders) +
         reserved_.at(order)++ % (kNumbers / kOrders);
}

void Exchanges::check(const Tensors& messages, const Stage& stage, const char* name) const {
  const auto& [place, number] = stage;
  TORCH_CHECK_VALUE(place >= 0 && number >= 0 && number < kStages,
                    "exchange: place must be one that reserve() gave, and stage 0 or 1, got ",
                    place, " and ", number);
  TORCH_CHECK_VALUE(static_cast<int64_t>(messages.size()) == channel_->size() &&
                        std::all_of(messages.begin(), messages.end(),
                                    [](const at::Tensor& message) {
                                      return message.defined() && message.dim() == 1 &&
                                             message.device().is_cpu() &&
                                             message.scalar_type() == at::kByte &&
                                             message.is_contiguous();
                                    }),
                    "exchange: ", name, " must hold a flat uint8 tensor on the CPU for each rank");
}

void Exchanges::begin(const Tensors* inputs, const Tensors* outputs, const Stage& stage,
                      std::chrono::milliseconds timeout, const std::string& form,
                      const std::shared_ptr<Part>& part) const {
  const auto& [place, number] = stage;
  if (place / kNumbers != generation_) {
    part->end(std::make_exception_ptr(error_of_another_step(channel_->rank())));
    return;
  }
  Channel::Exchange exchange;
  const auto add = [&](std::vector<Channel::Message>& messages, int peer, const at::Tensor& tensor,
                       const void* memory) {
    if (tensor.numel() > 0) {
      messages.push_back({peer, static_cast<uint32_t>(place % kNumbers),
                          kOfExchange + static_cast<uint32_t>(number),
                          static_cast<uint8_t*>(const_cast<void*>(memory)), tensor.nbytes()});
    }
  };
  for (int distance = 1; distance < channel_->size(); ++distance) {
    const int peer = (channel_->rank() + distance) % channel_->size();
    if (inputs != nullptr) {
      add(exchange.sends, peer, (*inputs)[peer], (*inputs)[peer].const_data_ptr());
    }
    if (outputs != nullptr) {
      add(exchange.receives, peer, (*outputs)[peer], (*outputs)[peer].mutable_data_ptr());
    }
  }
  exchange.form = crc32c(reinterpret_cast<const uint8_t*>(form.data()), form.size());
  exchange.what = c10::str("exchange ", name_of(place), number == 0 ? "" : ", sums",
                           form.empty() ? "" : " of ", form);
  exchange.timeout = timeout;
  channel_->begin(std::move(exchange),
                  [part](std::exception_ptr error) { part->end(std::move(error)); });
}

void Exchanges::expect(Tensors outputs, int64_t place, int64_t stage,
                       std::chrono::milliseconds timeout, const std::string& form) {
  const Stage key{place, stage};
  check(outputs, key, "outputs");
  auto part = std::make_shared<Part>();
  {
    const std::lock_guard lock(mutex_);
    const auto [found, is_new] = expected_.try_emplace(key, outputs, part);
    TORCH_CHECK_VALUE(is_new, "exchange: stage ", stage, " of place ", place % kNumbers,
                      " was expected before");
  }
  begin(nullptr, &outputs, key, timeout, form, part);
}

Exchanges::FuturePtr Exchanges::start(Tensors inputs, Tensors outputs, at::Tensor result,
                                      int64_t place, int64_t stage,
                                      std::chrono::milliseconds timeout, const std::string& form) {
  const Stage key{place, stage};
  check(inputs, key, "inputs");
  check(outputs, key, "outputs");
  std::shared_ptr<Part> received;
  {
    const std::lock_guard lock(mutex_);
    const auto found = expected_.find(key);
    if (found != expected_.end()) {
      const auto& wanted = found->second.first;
      for (int rank = 0; rank < channel_->size(); ++rank) {
        TORCH_CHECK_VALUE(
            rank == channel_->rank() || (outputs[rank].data_ptr() == wanted[rank].data_ptr() &&
                                         outputs[rank].numel() == wanted[rank].numel()),
            "exchange: outputs must be the tensors that expect() was given for this "
            "place; that of rank ",
            rank, " differs");
      }
      received = std::move(expected_.extract(found).mapped().second);
    }
  }
  auto done = c10::make_intrusive<Future>(c10::TensorType::get());
  // What may own Python objects goes on a thread that may wait for the GIL.
  struct Whole {
    std::shared_ptr<Channel> channel;
    FuturePtr done;
    Tensors inputs;
    Tensors outputs;
    at::Tensor result;
    std::mutex mutex;
    int open = 0;
    std::exception_ptr error;
  };
  auto whole = std::make_shared<Whole>();
  whole->channel = channel_;
  whole->done = done;
  whole->inputs = inputs;
  whole->outputs = outputs;
  whole->result = std::move(result);
  whole->open = received == nullptr ? 1 : 2;
  const auto end = [whole](std::exception_ptr error) mutable {
    {
      const std::lock_guard lock(whole->mutex);
      whole->error = whole->error ? whole->error : error;
      if (--whole->open > 0) {
        whole.reset();
        return;
      }
    }
    const auto channel = whole->channel;
    channel->run([whole = std::move(whole)] {
      if (whole->error) {
        whole->done->setError(whole->error);
      } else {
        whole->done->markCompleted(whole->result);
      }
    });
  };
  whole.reset();
  const auto sent = std::make_shared<Part>();
  sent->when_over(end);
  begin(&inputs, received == nullptr ? &outputs : nullptr, key, timeout, form, sent);
  if (received != nullptr) {
    received->when_over(end);
  }
  return done;
}

std::string Exchanges::name_of(int64_t place) const {
  return c10::str(place % (kNumbers / kOrders), " of order ",
                  place % kNumbers / (kNumbers / kOrders));
}

Exchanges::FuturePtr Exchanges::gather(const Tensors& parts, at::Tensor result, int64_t place,
                                       std::chrono::milliseconds timeout, const std::string& form) {
  check(parts, {place, 0}, "parts");
  const auto operation = std::make_shared<Operation>(channel_);
  operation->base(kOfPattern);
  add_all_gather(*operation, parts);
  return run(*operation, {c10d::OpType::ALLGATHER, "gather", form}, std::move(result), place,
             timeout);
}

Exchanges::FuturePtr Exchanges::reduce(const at::Tensor& tensor, bool takes_maximum,
                                       at::Tensor result, int64_t place,
                                       std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(
      tensor.defined() && tensor.dim() == 1 && tensor.is_cpu() && tensor.is_contiguous(),
      "exchange: the tensor to reduce must be flat, and on the CPU");
  const Reduction reduction(takes_maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM,
                            tensor.scalar_type(), channel_->size());
  const auto operation = std::make_shared<Operation>(channel_);
  operation->base(kOfPattern);
  add_all_reduce(*operation, Operation::input(tensor), reduction);
  Request request{c10d::OpType::ALLREDUCE, takes_maximum ? "maximum" : "sum"};
  request.of = c10::str(tensor.numel(), " ", c10::getDtypeNames(tensor.scalar_type()).first);
  return run(*operation, std::move(request), std::move(result), place, timeout);
}

Exchanges::FuturePtr Exchanges::run(Operation& operation, Request request, at::Tensor result,
                                    int64_t place, std::chrono::milliseconds timeout) const {
  auto done = c10::make_intrusive<Future>(c10::TensorType::get());
  if (place / kNumbers != generation_) {
    done->setError(std::make_exception_ptr(error_of_another_step(channel_->rank())));
    return done;
  }
  request.number = static_cast<uint64_t>(place % kNumbers);
  request.place = name_of(place);
  request.timeout = timeout;
  operation.begin(std::move(request))
      ->getFuture()
      ->addCallback([done, result = std::move(result)](Future& over) {
        if (over.hasError()) {
          done->setError(over.exception_ptr());
        } else {
          done->markCompleted(result);
        }
      });
  return done;
}

}  // namespace commhook::wire
