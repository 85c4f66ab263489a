#include "runtime/wire/operation.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "runtime/wire/frame.h"

namespace commhook::wire {
namespace {

using c10::ivalue::Future;
using std::chrono::milliseconds;

// The most bytes that the endpoint's thread computes with.
constexpr size_t kAtOnce = 64 * 1024;

}  // namespace

std::string Request::text() const {
  std::string text = name + " " + (place.empty() ? std::to_string(number) : place);
  if (!of.empty()) {
    text += " of " + of;
  }
  return text + where;
}

WireWork::WireWork(std::shared_ptr<Channel> channel, Request request, const Staging* staging)
    : Work(channel->rank(), request.type),
      channel_(std::move(channel)),
      request_(std::move(request)),
      staging_(staging) {}

bool WireWork::is_over_by(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return cv_.wait_until(lock, deadline, [this] { return completed_; });
}

bool WireWork::wait(milliseconds timeout) {
  const auto longest = std::min(timeout, kLongestTimeout);
  if (timeout > kNoTimeout && !is_over_by(std::chrono::steady_clock::now() + longest)) {
    const std::string text = c10::str(request_.text(), ": not complete after ", timeout.count(),
                                      " ms, for which rank ", rank_, " has waited");
    channel_->fail(text);
    throw PeerError({Failure::Kind::kTimeout, rank_, text});
  }
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [this] { return completed_; });
  if (const auto error = exception_) {
    lock.unlock();
    std::rethrow_exception(error);
  }
  if (written_) {
    written_->block(staging_->current());
  }
  return true;
}

std::vector<at::Tensor> WireWork::result() {
  TORCH_CHECK(isCompleted(), request_.text(), ": result() needs wait() first");
  TORCH_CHECK(request_.outputs.size() <= 1, request_.text(),
              ": result() has no form for a list of lists; use get_future().value()");
  return request_.outputs.empty() ? Tensors() : request_.outputs.front();
}

c10::intrusive_ptr<Future> WireWork::getFuture() {
  std::lock_guard lock(mutex_);
  if (future_ == nullptr) {
    c10::TypePtr type = c10::ListType::ofTensors();
    if (request_.outputs.size() > 1) {
      type = c10::ListType::create(type);
    }
    future_ = c10::make_intrusive<Future>(
        type, staging_ == nullptr ? std::vector<c10::Device>() : std::vector{staging_->device()});
    if (completed_) {  // no callback can be there yet
      fill(*future_);
    }
  }
  return future_;
}

void WireWork::fill(Future& future) const {
  // A Future's readers wait for the stream that is current here.
  std::optional<c10::StreamGuard> guard;
  if (staging_ != nullptr) {
    guard.emplace(staging_->writing());
  }
  if (exception_) {
    future.setError(exception_);
  } else if (request_.outputs.size() > 1) {
    future.markCompleted(request_.outputs);
  } else {
    future.markCompleted(request_.outputs.empty() ? Tensors() : request_.outputs.front());
  }
}

void WireWork::complete(const std::exception_ptr& error) {
  c10::intrusive_ptr<Future> future;
  {
    std::lock_guard lock(mutex_);
    exception_ = error;
    if (staging_ != nullptr && !error) {
      written_.emplace(staging_->device().type());
      written_->record(staging_->writing());
    }
    completed_ = true;
    future = future_;
  }
  cv_.notify_all();
  if (future != nullptr) {
    channel_->run(
        [self = c10::intrusive_ptr<WireWork>::reclaim_copy(this), future] { self->fill(*future); });
  }
}

void WireWork::abort() { channel_->fail(request_.text() + ": aborted"); }

std::vector<int> Operation::others() const {
  // From the next rank on, so that not all send to rank 0 first.
  std::vector<int> others;
  for (int distance = 1; distance < size(); ++distance) {
    others.push_back((rank() + distance) % size());
  }
  return others;
}

at::Tensor Operation::elements(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;  // a tensor that autograd does not know
  return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1);
}

at::Tensor Operation::input(const at::Tensor& tensor) { return staged(elements(tensor), true); }

at::Tensor Operation::output(const Tensors& tensors, bool is_read) {
  Tensors flat;
  for (const auto& tensor : tensors) {
    flat.push_back(elements(tensor));
  }
  const bool is_copy = !flat[0].is_alias_of(tensors[0]);
  auto all = flat[0];
  if (flat.size() > 1 || is_copy) {
    all = flat.size() == 1 ? flat[0] : at::cat(flat);
    int64_t begin = 0;
    for (const auto& tensor : tensors) {
      copies_.emplace_back(tensor, all.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
      begin += tensor.numel();
    }
  }
  const auto memory = staged(all, is_read);
  if (!memory.is_same(all)) {
    puts_.emplace_back(all, memory);
  }
  return memory;
}

at::Tensor Operation::staged(const at::Tensor& flat, bool is_read) {
  if (flat.is_cpu()) {
    return flat;
  }
  staging_ = &Staging::on(flat.device());
  auto memory = Staging::memory(flat);
  if (is_read && flat.numel() > 0) {
    staging_->fetch(flat, memory);
    tensors_.push_back(flat);
    has_fetched_ = true;
  }
  return memory;
}

void Operation::copy(const at::Tensor& to, const at::Tensor& from) {
  if (staging_ == nullptr) {
    to.copy_(from);
  } else {
    first_.emplace_back(to, from);
  }
}

void Operation::then(size_t bytes, std::function<void()> compute) {
  steps_.emplace_back();
  steps_.back().compute = std::move(compute);
  steps_.back().bytes = bytes;
  round();
}

Channel::Message Operation::message(int peer, const at::Tensor& tensor, void* memory) {
  if (!tensor.defined()) {
    return {peer, 0, stage_, nullptr, 0};
  }
  tensors_.push_back(tensor);
  return {peer, 0, stage_, static_cast<uint8_t*>(memory), tensor.nbytes()};
}

void Operation::send(int peer, const at::Tensor& tensor) {
  const void* memory = tensor.defined() ? tensor.const_data_ptr() : nullptr;
  steps_.back().sends.push_back(message(peer, tensor, const_cast<void*>(memory)));
}

void Operation::receive(int peer, const at::Tensor& tensor) {
  void* memory = tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  steps_.back().receives.push_back(message(peer, tensor, memory));
}

void Operation::exchange(int peer, const at::Tensor& sent, const at::Tensor& received) {
  send(peer, sent);
  receive(peer, received);
}

c10::intrusive_ptr<WireWork> Operation::begin(Request request) {
  size_t bytes = staging_ == nullptr ? 0 : kAtOnce + 1;  // a device may take its time
  for (const auto& copy : copies_) {
    bytes += 2 * copy.first.nbytes();
  }
  then(bytes, [this] { write_results(); });
  auto work = c10::make_intrusive<WireWork>(channel_, std::move(request), staging_);
  work_ = work;
  if (staging_ == nullptr) {
    go_on();
    return work;
  }
  begun_ = staging_->now();
  const auto start = [self = shared_from_this(),
                      busy = channel_->busy()](std::exception_ptr error) {
    self->error_ = std::move(error);
    for (const auto& [to, from] : self->first_) {
      to.copy_(from);
    }
    if (self->error_) {  // others wait for this rank's messages
      self->channel_->fail(self->work_->request().text() + ": the device has failed");
    }
    self->go_on();
  };
  if (has_fetched_) {
    staging_->when_fetched(start);
  } else {
    start(nullptr);
  }
  return work;
}

void Operation::write_results() {
  std::optional<c10::StreamGuard> guard;
  if (staging_ != nullptr) {
    begun_->block(staging_->writing());
    guard.emplace(staging_->writing());
  }
  for (const auto& [to, from] : puts_) {
    staging_->put(to, from);
  }
  for (const auto& [to, from] : copies_) {
    to.copy_(from);
  }
}

void Operation::go_on() {
  while (error_ == nullptr && next_ < steps_.size()) {
    Step& step = steps_[next_++];
    if (!exchanged(step) || !computed(step)) {
      return;
    }
  }
  finish();
}

bool Operation::exchanged(Step& step) {
  if (step.sends.empty() && step.receives.empty()) {
    return true;
  }
  const Request& request = work_->request();
  const std::string form = request.name + " of " + request.of;
  Channel::Exchange exchange;
  exchange.sends = std::move(step.sends);
  exchange.receives = std::move(step.receives);
  exchange.form = crc32c(reinterpret_cast<const uint8_t*>(form.data()), form.size());
  exchange.what = request.text();
  for (auto* messages : {&exchange.sends, &exchange.receives}) {
    for (auto& message : *messages) {
      message.slot = static_cast<uint32_t>(request.number);
    }
  }
  exchange.owner = shared_from_this();
  exchange.timeout = request.timeout;
  // The second of begin() and its callback goes on, so that there is no recursion.
  open_ = 2;
  channel_->begin(std::move(exchange), [self = shared_from_this()](std::exception_ptr error) {
    self->error_ = std::move(error);
    if (--self->open_ == 0) {
      self->go_on();
    }
  });
  return --open_ == 0;
}

bool Operation::computed(Step& step) {
  if (step.compute == nullptr) {
    return true;
  }
  if (step.bytes <= kAtOnce) {
    compute(step);
    return true;
  }
  channel_->run([self = shared_from_this(), &step] {
    self->compute(step);
    self->go_on();
  });
  return false;
}

void Operation::compute(const Step& step) {
  try {
    const at::AutoDispatchBelowADInplaceOrView guard;
    step.compute();
  } catch (const std::exception& error) {
    error_ = std::current_exception();
    channel_->fail(work_->request().text() + ": " + error.what());  // others wait for the result
  }
}

void Operation::finish() {
  // Whoever drops the operation last, perhaps while it holds a lock, finds nothing left in it.
  steps_.clear();
  tensors_.clear();
  for (auto* copies : {&first_, &puts_, &copies_}) {
    copies->clear();
  }
  auto work = std::move(work_);
  work->complete(std::exchange(error_, nullptr));
  if (work.use_count() == 1) {  // tensors may have Python objects, which need the GIL to go
    channel_->run([work = std::move(work)] {});
  }
}

}  // namespace commhook::wire
