#include "runtime/wire/exchanges.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <functional>
#include <optional>

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
  const auto is_message = [&](const at::Tensor& message) {
    return message.defined() && message.dim() == 1 && message.scalar_type() == at::kByte &&
           message.is_contiguous() && !message.is_meta() &&
           message.device() == messages[0].device();
  };
  TORCH_CHECK_VALUE(static_cast<int64_t>(messages.size()) == channel_->size() &&
                        std::all_of(messages.begin(), messages.end(), is_message),
                    "exchange: ", name,
                    " must hold a flat uint8 tensor for each rank, all on one "
                    "device");
}

bool Exchanges::is_of_another_step(int64_t place) const { return place / kNumbers != generation_; }

Tensors Exchanges::memory_for(const Tensors& messages) const {
  if (messages[0].is_cpu()) {
    return messages;
  }
  Tensors memory;
  for (const auto& message : messages) {
    const bool is_own = static_cast<int>(memory.size()) == channel_->rank();
    memory.push_back(is_own ? at::empty({0}, at::kByte) : Staging::memory(message));
  }
  return memory;
}

void Exchanges::begin(Channel& channel, const Tensors* inputs, const Tensors* outputs,
                      const Stage& stage, std::chrono::milliseconds timeout,
                      const std::string& form, const std::shared_ptr<Part>& part) {
  const auto& [place, number] = stage;
  Channel::Exchange exchange;
  const auto add = [&](std::vector<Channel::Message>& messages, int peer, const at::Tensor& tensor,
                       const void* memory) {
    if (tensor.numel() > 0) {
      messages.push_back({peer, static_cast<uint32_t>(place % kNumbers),
                          kOfExchange + static_cast<uint32_t>(number),
                          static_cast<uint8_t*>(const_cast<void*>(memory)), tensor.nbytes()});
    }
  };
  for (int distance = 1; distance < channel.size(); ++distance) {
    const int peer = (channel.rank() + distance) % channel.size();
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
  channel.begin(std::move(exchange),
                [part](std::exception_ptr error) { part->end(std::move(error)); });
}

void Exchanges::expect(Tensors outputs, int64_t place, int64_t stage,
                       std::chrono::milliseconds timeout, const std::string& form) {
  const Stage key{place, stage};
  check(outputs, key, "outputs");
  auto part = std::make_shared<Part>();
  const auto memory = memory_for(outputs);
  {
    const std::lock_guard lock(mutex_);
    const auto [found, is_new] = expected_.try_emplace(key, Expected{outputs, memory, part});
    TORCH_CHECK_VALUE(is_new, "exchange: stage ", stage, " of place ", place % kNumbers,
                      " was expected before");
  }
  if (is_of_another_step(place)) {
    part->end(std::make_exception_ptr(error_of_another_step(channel_->rank())));
    return;
  }
  begin(*channel_, nullptr, &memory, key, timeout, form, part);
}

// An exchange that was started. What may own Python objects goes on a thread that may wait for the
// GIL.
struct Exchanges::Started {
  std::shared_ptr<Channel> channel;
  FuturePtr done;
  Tensors inputs;
  Tensors outputs;
  at::Tensor result;
  Tensors sent;      // the memory of the host for the inputs, or the inputs
  Tensors received;  // as is that of the outputs
  Staging* staging = nullptr;
  std::optional<c10::Event> begun;  // of the caller's stream
  std::mutex mutex;
  int open = 0;
  std::exception_ptr error;

  void finish() {
    std::optional<c10::StreamGuard> guard;
    if (staging != nullptr) {
      guard.emplace(staging->writing());
    }
    try {
      if (staging != nullptr && !error) {
        begun->block(staging->writing());
        for (size_t rank = 0; rank < outputs.size(); ++rank) {
          if (received[rank].numel() > 0) {
            staging->put(outputs[rank], received[rank]);
          }
        }
      }
    } catch (...) {
      error = std::current_exception();
    }
    if (error) {
      done->setError(error);
    } else {
      done->markCompleted(result);
    }
  }
};

Exchanges::FuturePtr Exchanges::start(Tensors inputs, Tensors outputs, at::Tensor result,
                                      int64_t place, int64_t stage,
                                      std::chrono::milliseconds timeout, const std::string& form) {
  const Stage key{place, stage};
  check(inputs, key, "inputs");
  check(outputs, key, "outputs");
  TORCH_CHECK_VALUE(inputs[0].device() == outputs[0].device(), "exchange: inputs are on ",
                    inputs[0].device(), " and outputs on ", outputs[0].device());
  auto whole = std::make_shared<Started>();
  std::shared_ptr<Part> received;
  {
    const std::lock_guard lock(mutex_);
    const auto found = expected_.find(key);
    if (found != expected_.end()) {
      const auto& wanted = found->second.outputs;
      for (int rank = 0; rank < channel_->size(); ++rank) {
        TORCH_CHECK_VALUE(
            rank == channel_->rank() || (outputs[rank].data_ptr() == wanted[rank].data_ptr() &&
                                         outputs[rank].numel() == wanted[rank].numel()),
            "exchange: outputs must be the tensors that expect() was given for this "
            "place; that of rank ",
            rank, " differs");
      }
      whole->received = std::move(found->second.memory);
      received = std::move(expected_.extract(found).mapped().part);
    }
  }
  const auto device = inputs[0].device();
  whole->staging = device.is_cpu() ? nullptr : &Staging::on(device);
  const auto done = c10::make_intrusive<Future>(
      c10::TensorType::get(), device.is_cpu() ? std::vector<c10::Device>() : std::vector{device});
  whole->channel = channel_;
  whole->done = done;
  whole->inputs = std::move(inputs);
  whole->outputs = std::move(outputs);
  whole->result = std::move(result);
  whole->sent = whole->inputs;
  if (received == nullptr) {
    whole->received = memory_for(whole->outputs);
  }
  whole->open = received == nullptr ? 1 : 2;
  if (whole->staging != nullptr) {
    whole->begun = whole->staging->now();
    fetch_all(*whole);
  }
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
    channel->run([whole = std::move(whole)] { whole->finish(); });
  };
  const auto sent = std::make_shared<Part>();
  sent->when_over(end);
  const auto go = [=, is_expected = received != nullptr](std::exception_ptr error) {
    if (error) {  // others wait for this rank's messages
      whole->channel->fail("an exchange: the device has failed");
      sent->end(std::move(error));
      return;
    }
    begin(*whole->channel, &whole->sent, is_expected ? nullptr : &whole->received, key, timeout,
          form, sent);
  };
  if (is_of_another_step(place)) {
    sent->end(std::make_exception_ptr(error_of_another_step(channel_->rank())));
  } else if (whole->staging == nullptr) {
    go(nullptr);
  } else {
    whole->staging->when_fetched(
        [go, busy = channel_->busy()](std::exception_ptr error) { go(std::move(error)); });
  }
  if (received != nullptr) {
    received->when_over(end);
  }
  return done;
}

void Exchanges::fetch_all(Started& whole) {
  std::map<const void*, at::Tensor> memory;  // ranks may get the same message
  for (size_t rank = 0; rank < whole.inputs.size(); ++rank) {
    const auto& message = whole.inputs[rank];
    auto& found = memory[message.const_data_ptr()];
    if (static_cast<int>(rank) == whole.channel->rank() || message.numel() == 0) {
      whole.sent[rank] = at::empty({0}, at::kByte);
      continue;
    }
    if (!found.defined() || found.numel() != message.numel()) {
      found = Staging::memory(message);
      whole.staging->fetch(message, found);
    }
    whole.sent[rank] = found;
  }
}

std::string Exchanges::name_of(int64_t place) {
  return c10::str(place % (kNumbers / kOrders), " of order ",
                  place % kNumbers / (kNumbers / kOrders));
}

Exchanges::FuturePtr Exchanges::gather(const Tensors& parts, at::Tensor result, int64_t place,
                                       std::chrono::milliseconds timeout, const std::string& form) {
  check(parts, {place, 0}, "parts");
  const auto operation = std::make_shared<Operation>(channel_);
  operation->base(kOfPattern);
  Tensors memory;
  for (const auto& part : parts) {
    memory.push_back(
        operation->output({part}, static_cast<int>(memory.size()) == channel_->rank()));
  }
  add_all_gather(*operation, memory);
  return run(*operation, {c10d::OpType::ALLGATHER, "gather", form}, std::move(result), place,
             timeout);
}

Exchanges::FuturePtr Exchanges::reduce(const at::Tensor& tensor, bool takes_maximum,
                                       at::Tensor result, int64_t place,
                                       std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(
      tensor.defined() && tensor.dim() == 1 && tensor.is_contiguous() && !tensor.is_meta(),
      "exchange: the tensor to reduce must be flat");
  const Reduction reduction(takes_maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM,
                            tensor.scalar_type(), channel_->size());
  const auto operation = std::make_shared<Operation>(channel_);
  operation->base(kOfPattern);
  add_all_reduce(*operation, operation->output({tensor}, true), reduction);
  Request request{c10d::OpType::ALLREDUCE, takes_maximum ? "maximum" : "sum"};
  request.of = c10::str(tensor.numel(), " ", c10::getDtypeNames(tensor.scalar_type()).first);
  return run(*operation, std::move(request), std::move(result), place, timeout);
}

Exchanges::FuturePtr Exchanges::run(Operation& operation, Request request, at::Tensor result,
                                    int64_t place, std::chrono::milliseconds timeout) const {
  const auto device = result.device();
  auto done = c10::make_intrusive<Future>(
      c10::TensorType::get(), device.is_cpu() ? std::vector<c10::Device>() : std::vector{device});
  if (is_of_another_step(place)) {
    done->setError(std::make_exception_ptr(error_of_another_step(channel_->rank())));
    return done;
  }
  request.number = static_cast<uint64_t>(place % kNumbers);
  request.place = name_of(place);
  request.timeout = timeout;
  request.outputs = {{result}};  // for which the callback's stream waits
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
