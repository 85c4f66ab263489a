#include "runtime/wire/link.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace commhook::wire {
namespace {

uint64_t chunks_of(uint64_t total) { return std::max<uint64_t>(1, (total + kChunk - 1) / kChunk); }

Key first_of(uint64_t channel, uint32_t epoch) { return {channel, epoch, 0, 0}; }

// The messages of a channel.
template <typename Messages>
auto first_in(Messages& messages, uint64_t channel) {
  return messages.lower_bound(first_of(channel, 0));
}

template <typename Messages>
auto end_in(Messages& messages, uint64_t channel) {
  return messages.upper_bound({channel, UINT32_MAX, UINT32_MAX, UINT32_MAX});
}

}  // namespace

Link::Link(size_t rails, Greeting greeting, Check check, size_t credit)
    : greeting_(std::move(greeting)), check_(std::move(check)), credit_(credit) {
  Rail::Owner& owner = *this;
  for (size_t i = 0; i < rails; ++i) {
    rails_.push_back(std::make_unique<Rail>(owner, i));
  }
}

void Link::complete(uint64_t id, Result result) { completions_.push_back({id, result}); }

void Link::control(Kind kind, const Key& key, Shape shape, std::string text) {
  Frame frame = text_frame(kind, std::move(text));
  frame.header.key = key;
  frame.header.shape = shape;
  control_.push_back(std::move(frame));
}

bool Link::is_over(const Key& key) const {
  const auto found = epochs_.find(key.channel);
  return found != epochs_.end() && key.epoch < found->second;
}

std::vector<Link::Completion> Link::take_completions() { return std::exchange(completions_, {}); }

std::vector<Link::Notice> Link::take_notices() { return std::exchange(notices_, {}); }

// ---- sending ------------------------------------------------------------------------------------

void Link::send(uint64_t id, const Key& key, const uint8_t* data, Shape shape) {
  if (end_ != Rail::End::kNone || is_over(key) || others_left_.count(key.channel) > 0) {
    complete(id, end_ != Rail::End::kNone ? Result::kEnded : Result::kEpochOver);
    return;
  }
  sending_[key] = {id, data, shape};
  queue_.push_back(key);
  const auto ready = ready_.find(key);
  if (ready != ready_.end()) {
    const Shape expected = ready->second;
    ready_.erase(ready);
    (void)take_ready(key, expected);
  }
}

bool Link::may_send(const Outgoing& outgoing) const {
  const uint64_t length = std::min<uint64_t>(kChunk, outgoing.shape.total - outgoing.next);
  return outgoing.is_ready || credit_used_ + length + kMessageCost <= credit_;
}

bool Link::is_acknowledged() const {
  return control_.empty() && queue_.empty() && leaving_.empty() && unhurried_.empty() &&
         std::all_of(rails_.begin(), rails_.end(),
                     [](const auto& each) { return each->is_acknowledged(); });
}

bool Link::next(Frame& frame, bool has_others) {
  const auto take_first = [&frame](std::deque<Frame>& frames) {
    frame = std::move(frames.front());
    frames.pop_front();
    return true;
  };
  if (!control_.empty()) {
    return take_first(control_);
  }
  const auto found = std::find_if(queue_.begin(), queue_.end(),
                                  [this](const Key& key) { return may_send(sending_.at(key)); });
  if (found == queue_.end()) {
    const bool hurries = has_others || unhurried_.size() > kMostUnhurried;
    return hurries && !unhurried_.empty() && take_first(unhurried_);
  }
  const Key key = *found;
  Outgoing& outgoing = sending_.at(key);
  const uint64_t offset = outgoing.next;
  const uint64_t length = std::min<uint64_t>(kChunk, outgoing.shape.total - offset);
  frame.header.kind = Kind::kData;
  frame.header.key = key;
  frame.header.shape = outgoing.shape;
  frame.header.offset = offset;
  frame.payload = {outgoing.data + offset, length, nullptr};
  outgoing.next += length;
  if (!outgoing.is_ready) {
    outgoing.credit += length + kMessageCost;
    credit_used_ += length + kMessageCost;
  }
  if (outgoing.next < outgoing.shape.total) {
    return true;
  }
  queue_.erase(found);
  outgoing.is_given = true;
  complete(outgoing.id, Result::kDone);
  frame.payload.copy();
  for (auto& each : rails_) {
    if (offset > 0) {
      each->own(key);
    }
  }
  if (outgoing.is_ready) {
    sending_.erase(key);
  }
  return true;
}

void Link::acknowledged(const Header& header) {
  say_left();
  if (header.kind == Kind::kEpoch) {
    const auto owed = owed_.find({header.key.channel, header.key.epoch});
    if (owed != owed_.end()) {
      credit_used_ -= owed->second;
      owed_.erase(owed);
    }
  }
}

bool Link::take_ready(const Key& key, Shape shape) {
  const auto found = sending_.find(key);
  if (found == sending_.end()) {
    if (!is_over(key) && left_.count(key.channel) == 0) {
      ready_[key] = shape;
    }
    return ready_.size() <= kMostRemembered;
  }
  Outgoing& outgoing = found->second;
  if (outgoing.is_ready) {
    return false;
  }
  outgoing.is_ready = true;
  credit_used_ -= std::exchange(outgoing.credit, 0);
  if (shape != outgoing.shape) {
    control(Kind::kMisfit, key, outgoing.shape);
    notices_.push_back({Kind::kMisfit, key, "", true, outgoing.shape, shape});
    for (auto& each : rails_) {
      each->withdraw([&key](const Key& other) { return other == key; });
    }
    if (!outgoing.is_given) {
      complete(outgoing.id, Result::kMisfit);
      queue_.erase(std::remove(queue_.begin(), queue_.end(), key), queue_.end());
    }
    sending_.erase(found);
  } else if (outgoing.is_given) {
    sending_.erase(found);
  }
  return true;
}

// ---- receiving ----------------------------------------------------------------------------------

void Link::receive(uint64_t id, const Key& key, uint8_t* memory, Shape shape) {
  const bool has_ended = end_ != Rail::End::kNone && incoming_.count(key) == 0;
  if (has_ended || is_over(key)) {
    complete(id, has_ended ? Result::kEnded : Result::kEpochOver);
    return;
  }
  control(Kind::kReady, key, shape);
  if (shape.total <= kSmall) {
    unhurried_.push_back(std::move(control_.back()));
    control_.pop_back();
  }
  const auto [found, is_new] = incoming_.try_emplace(key);
  Incoming& incoming = found->second;
  for (const auto& [offset, early] : incoming.early) {
    kept_ -= early.bytes.size() + kMessageCost;
  }
  incoming.id = id;
  incoming.is_posted = true;
  incoming.memory = memory;
  const Shape other = std::exchange(incoming.shape, shape);
  if (!is_new && other != shape) {
    misfit(key, incoming, other);
    return;
  }
  incoming.has.resize(chunks_of(shape.total));
  for (auto each = incoming.early.begin(); each != incoming.early.end();) {
    auto& [offset, early] = *each;
    if (!early.is_whole) {  // take() copies it
      ++each;
      continue;
    }
    std::copy(early.bytes.begin(), early.bytes.end(), incoming.memory + offset);
    incoming.has[offset / kChunk] = true;
    ++incoming.count;
    each = incoming.early.erase(each);
  }
  finish_if_whole(key, incoming);
}

void Link::finish_if_whole(const Key& key, Incoming& incoming) {
  if (incoming.is_posted && incoming.count == incoming.has.size()) {
    complete(incoming.id, Result::kDone);
    incoming_.erase(key);
  }
}

// The receiver sees it, or the sender has said it.
void Link::misfit(const Key& key, Incoming& incoming, Shape other) {
  notices_.push_back({Kind::kMisfit, key, "", false, incoming.shape, other});
  drop(incoming, Result::kMisfit);
  incoming.is_over = true;
}

Rail::Place Link::place(const Header& header) {
  constexpr Rail::Place kWrong{Rail::Place::Kind::kWrong, nullptr};
  constexpr Rail::Place kNowhere{Rail::Place::Kind::kNowhere, nullptr};
  const uint64_t offset = header.offset;
  if (offset % kChunk != 0 || offset > header.shape.total ||
      header.length != std::min<uint64_t>(kChunk, header.shape.total - offset) ||
      (header.length == 0 && header.shape.total > 0)) {
    return kWrong;
  }
  if (is_over(header.key) || left_.count(header.key.channel) > 0) {
    return kNowhere;
  }
  const auto [found, is_new] = incoming_.try_emplace(header.key);
  Incoming& incoming = found->second;
  if (incoming.is_over) {
    return kNowhere;
  }
  if (is_new) {
    incoming.shape = header.shape;
  }
  if (incoming.shape != header.shape) {
    if (!incoming.is_posted) {
      return kWrong;
    }
    misfit(header.key, incoming, header.shape);
    return kNowhere;
  }
  if (incoming.is_posted && incoming.has[offset / kChunk]) {
    return kWrong;
  }
  const auto early = incoming.early.find(offset);
  if (early != incoming.early.end()) {  // the connection broke in the middle of the chunk
    return early->second.is_whole
               ? kWrong
               : Rail::Place{Rail::Place::Kind::kMemory, early->second.bytes.data()};
  }
  if (incoming.is_posted) {
    return {Rail::Place::Kind::kMemory, incoming.memory + offset};
  }
  if (kept_ + header.length + kMessageCost > credit_) {
    return kWrong;
  }
  kept_ += header.length + kMessageCost;
  Early& fresh = incoming.early[offset];
  fresh.bytes.resize(header.length);
  return {Rail::Place::Kind::kMemory, fresh.bytes.data()};
}

bool Link::take(const Header& header, const std::string& text) {
  switch (header.kind) {
    case Kind::kData:
      return take_data(header);
    case Kind::kReady:
      return take_ready(header.key, header.shape);
    case Kind::kMisfit: {
      const auto found = incoming_.find(header.key);
      if (found != incoming_.end() && found->second.is_posted && !found->second.is_over) {
        misfit(header.key, found->second, header.shape);
      }
      return true;
    }
    case Kind::kVoid:
      return true;
    case Kind::kLeft:
    case Kind::kEpoch: {
      const bool is_known = left_.count(header.key.channel) == 0;  // else this side has left before
      if (header.kind == Kind::kLeft ? !take_left(header.key.channel)
                                     : !take_epoch(header.key.channel, header.key.epoch)) {
        return false;
      }
      if (!is_known) {
        return true;
      }
      break;
    }
    default:
      break;
  }
  notices_.push_back({header.kind, header.key, text, false, {}, {}});
  return true;
}

bool Link::take_data(const Header& header) {
  const auto found = incoming_.find(header.key);
  if (found == incoming_.end() || found->second.is_over) {
    return true;
  }
  Incoming& incoming = found->second;
  if (incoming.is_posted && incoming.has[header.offset / kChunk]) {
    return false;  // two rails had the same chunk
  }
  const auto early = incoming.early.find(header.offset);
  if (early != incoming.early.end()) {
    early->second.is_whole = true;
    if (!incoming.is_posted) {
      return true;
    }
    std::copy(early->second.bytes.begin(), early->second.bytes.end(),
              incoming.memory + header.offset);
    incoming.early.erase(early);
  }
  incoming.has[header.offset / kChunk] = true;
  ++incoming.count;
  finish_if_whole(header.key, incoming);
  return true;
}

// ---- the end of epochs and links ----------------------------------------------------------------

void Link::forget(const uint8_t* memory, size_t size) {
  for (auto& each : rails_) {
    each->forget(memory, size);
  }
}

void Link::drop_early(Incoming& incoming) {
  for (auto& [offset, early] : incoming.early) {
    forget(early.bytes.data(), early.bytes.size());
    kept_ -= incoming.is_posted ? 0 : early.bytes.size() + kMessageCost;
  }
  incoming.early.clear();
}

void Link::drop(Incoming& incoming, Result result) {
  drop_early(incoming);
  if (incoming.is_posted && !incoming.is_over) {
    forget(incoming.memory, incoming.shape.total);
    complete(incoming.id, result);
  }
}

void Link::begin_epoch(uint64_t channel, uint32_t epoch, std::string why) {
  if (!is_over({channel, epoch == 0 ? 0 : epoch - 1, 0, 0})) {
    control(Kind::kEpoch, first_of(channel, epoch), {}, std::move(why));
    owed_[{channel, epoch}] += end_epochs(channel, epoch);
  }
}

bool Link::take_epoch(uint64_t channel, uint32_t epoch) {
  if (epochs_.count(channel) == 0 && epochs_.size() >= kMostRemembered) {
    return false;
  }
  // The other side keeps nothing of older epochs.
  credit_used_ -= end_epochs(channel, epoch);
  const auto first = owed_.lower_bound({channel, 0});
  const auto last = owed_.upper_bound({channel, epoch});
  for (auto each = first; each != last; ++each) {
    credit_used_ -= each->second;
  }
  owed_.erase(first, last);
  return true;
}

// Returns the credit of what was sent in them.
size_t Link::end_epochs(uint64_t channel, uint32_t epoch) {
  uint32_t& oldest = epochs_[channel];
  if (epoch <= oldest) {
    return 0;
  }
  oldest = epoch;
  const Key first = first_of(channel, 0);
  const Key last = first_of(channel, epoch);
  for (auto each = incoming_.lower_bound(first); each != incoming_.lower_bound(last);) {
    drop(each->second, Result::kEpochOver);
    each = incoming_.erase(each);
  }
  size_t credit = 0;
  for (auto each = sending_.lower_bound(first); each != sending_.lower_bound(last);) {
    credit += each->second.credit;
    if (!each->second.is_given) {
      complete(each->second.id, Result::kEpochOver);
    }
    each = sending_.erase(each);
  }
  ready_.erase(ready_.lower_bound(first), ready_.lower_bound(last));
  withdraw([this](const Key& key) { return is_over(key); });
  return credit;
}

void Link::abandon(uint64_t channel) {
  // What was said of its messages would come after the other side has forgotten the channel.
  for (auto* frames : {&control_, &unhurried_}) {
    frames->erase(std::remove_if(frames->begin(), frames->end(),
                                 [channel](const Frame& frame) {
                                   return frame.header.kind == Kind::kReady &&
                                          frame.header.key.channel == channel;
                                 }),
                  frames->end());
  }
  size_t credit = 0;
  std::set<Key> gone;
  for (auto each = first_in(sending_, channel); each != end_in(sending_, channel);) {
    credit += each->second.credit;
    if (!each->second.is_given) {
      complete(each->second.id, Result::kEpochOver);
      gone.insert(each->first);
    }
    each = sending_.erase(each);
  }
  withdraw([&](const Key& key) { return gone.count(key) > 0; });
  ready_.erase(first_in(ready_, channel), end_in(ready_, channel));
  for (auto each = first_in(incoming_, channel); each != end_in(incoming_, channel);) {
    drop(each->second, Result::kEpochOver);
    each = incoming_.erase(each);
  }
  if (end_ != Rail::End::kNone || others_left_.erase(channel) > 0) {
    credit_used_ -= credit;
    epochs_.erase(channel);
  } else {
    left_[channel] = credit;
  }
}

void Link::leave(const Key& key, std::string why) {
  if (end_ == Rail::End::kNone) {
    leaving_.push_back({key, std::move(why), {}});
    say_left();
  }
}

// With one rail, frames arrive in order. With several, all that the channel has said must have
// come.
void Link::say_left() {
  const auto has_all = [this](Leaving& leaving) {
    if (rails_.size() == 1) {
      return true;
    }
    if (leaving.numbers.empty()) {
      if (std::any_of(control_.begin(), control_.end(), [&](const Frame& frame) {
            return frame.header.key.channel == leaving.key.channel;
          })) {
        return false;
      }
      for (const auto& each : rails_) {
        leaving.numbers.push_back(each->last_number());
      }
    }
    for (size_t i = 0; i < rails_.size(); ++i) {
      if (rails_[i]->acknowledged() < leaving.numbers[i]) {
        return false;
      }
    }
    return true;
  };
  while (!leaving_.empty() && has_all(leaving_.front())) {
    Leaving& leaving = leaving_.front();
    control(Kind::kLeft, leaving.key, {}, std::move(leaving.why));
    leaving_.pop_front();
  }
}

// Nobody waits for what was sent there, and nothing more comes.
bool Link::take_left(uint64_t channel) {
  for (auto each = first_in(sending_, channel); each != end_in(sending_, channel);) {
    credit_used_ -= each->second.credit;
    if (!each->second.is_given) {
      complete(each->second.id, Result::kEpochOver);
    }
    each = sending_.erase(each);
  }
  withdraw([channel](const Key& key) { return key.channel == channel; });
  ready_.erase(first_in(ready_, channel), end_in(ready_, channel));
  const auto left = left_.find(channel);
  if (left == left_.end()) {
    others_left_.insert(channel);
    return others_left_.size() <= kMostRemembered;
  }
  credit_used_ -= left->second;
  left_.erase(left);
  epochs_.erase(channel);
  return true;
}

void Link::withdraw(const std::function<bool(const Key&)>& goes) {
  queue_.erase(std::remove_if(queue_.begin(), queue_.end(), goes), queue_.end());
  for (auto& each : rails_) {
    each->withdraw(goes);
  }
}

void Link::end(Rail::End why, const std::string& text) {
  if (end_ != Rail::End::kNone) {
    return;
  }
  end_ = why;
  end_text_ = text;
  for (auto& each : rails_) {
    each->end(why, text);
  }
  for (auto each = incoming_.begin(); each != incoming_.end();) {
    Incoming& incoming = each->second;
    const auto whole = std::count_if(incoming.early.begin(), incoming.early.end(),
                                     [](const auto& early) { return early.second.is_whole; });
    if (!incoming.is_posted && !incoming.is_over &&
        static_cast<uint64_t>(whole) == chunks_of(incoming.shape.total)) {
      ++each;  // all of it has come: it can still be received
    } else {
      drop(incoming, Result::kEnded);
      each = incoming_.erase(each);
    }
  }
  for (auto& [key, outgoing] : sending_) {
    if (!outgoing.is_given) {
      complete(outgoing.id, Result::kEnded);
    }
  }
  sending_.clear();
  queue_.clear();
  control_.clear();
  unhurried_.clear();
  leaving_.clear();
  ready_.clear();
}

void Link::tick(Time now, Time lost_after) {
  say_left();
  std::move(unhurried_.begin(), unhurried_.end(), std::back_inserter(control_));
  unhurried_.clear();
  bool is_lost = true;
  for (auto& each : rails_) {
    if (each->state() == Rail::State::kEnded) {
      end(each->end(), each->text());
      return;
    }
    is_lost =
        is_lost && each->state() == Rail::State::kBroken && now - each->last_sign() >= lost_after;
  }
  if (is_lost) {
    end(Rail::End::kLost, "");
  }
}

}  // namespace commhook::wire
