#include "runtime/wire/rail.h"

#include <algorithm>
#include <map>
#include <utility>

namespace commhook::wire {
namespace {

constexpr size_t kNowhereBytes = 64 * 1024;

bool is_numbered(Kind kind) {
  return kind == Kind::kData || kind == Kind::kReady || kind == Kind::kMisfit ||
         kind == Kind::kEpoch || kind == Kind::kLeft || kind == Kind::kVoid;
}

bool lies_in(const uint8_t* data, const uint8_t* memory, size_t size) {
  return data != nullptr && data >= memory && data < memory + size;
}

}  // namespace

void Rail::connected(Time now) {
  if (state_ == State::kEnded) {
    return;
  }
  broken();
  state_ = State::kGreeting;
  must_greet_ = true;
  last_sign_ = now;
  last_write_ = now;
}

void Rail::broken() {
  if (state_ == State::kEnded) {
    return;
  }
  if (std::exchange(is_refusing_, false)) {
    end(End::kRefused, refusal_);
    return;
  }
  state_ = State::kBroken;
  must_greet_ = false;
  writing_.clear();
  next_to_write_ = 0;
  told_ = received_;  // a greeting says it
  header_read_ = 0;
}

void Rail::end(End why, std::string text) {
  if (state_ != State::kEnded) {
    is_refusing_ = false;
    broken();
    state_ = State::kEnded;
    end_ = why;
    text_ = std::move(text);
    unacknowledged_.clear();
  }
}

// ---- sending ------------------------------------------------------------------------------------

void Rail::write(Frame& frame, Time now) {
  frame.header.received = received_;
  frame.header.length = static_cast<uint32_t>(frame.payload.size);
  frame.header.checksum = crc32c(frame.payload.data, frame.payload.size);
  told_ = received_;
  told_at_ = now;
  Writing& writing = writing_.emplace_back();
  write_header(frame.header, writing.header.data());
  writing.payload = frame.payload;
  writing.number = frame.header.number;
  writing.key = frame.header.key;
}

void Rail::to_write(std::vector<Bytes>& found, size_t enough, Time now) {
  found.clear();
  if (state_ != State::kGreeting && state_ != State::kOpen) {
    return;
  }
  size_t waiting = 0;
  for (const auto& each : writing_) {
    waiting += kHeaderBytes + each.payload.size - each.written;
  }
  const auto add = [&](Frame& frame) {
    write(frame, now);
    waiting += kHeaderBytes + frame.payload.size;
  };
  if (must_greet_) {
    must_greet_ = false;
    Frame frame = text_frame(Kind::kGreeting, owner_.greeting(index_));
    add(frame);
  }
  if (is_refusing_ && writing_.empty()) {
    Frame frame = text_frame(Kind::kRefusal, refusal_);
    add(frame);
  }
  while (state_ == State::kOpen && waiting < enough) {
    if (next_to_write_ == unacknowledged_.size()) {
      Frame frame;
      if (!owner_.next(frame, !writing_.empty())) {
        break;
      }
      frame.header.number = ++last_number_;
      unacknowledged_.push_back(std::move(frame));
    }
    add(unacknowledged_[next_to_write_++]);
  }
  const bool is_idle = writing_.empty() && now - last_write_ >= kHeartbeat;
  const bool must_tell = received_ - told_ >= kFramesPerAcknowledgement ||
                         (told_ < received_ && now - told_at_ >= kLongestUnacknowledged);
  if (state_ == State::kOpen && (must_tell || is_idle)) {
    Frame frame;
    add(frame);
  }
  for (const auto& each : writing_) {
    if (each.written < kHeaderBytes) {
      found.push_back({each.header.data() + each.written, kHeaderBytes - each.written, nullptr});
    }
    const size_t of_payload = each.written < kHeaderBytes ? 0 : each.written - kHeaderBytes;
    if (of_payload < each.payload.size) {
      found.push_back({each.payload.data + of_payload, each.payload.size - of_payload, nullptr});
    }
  }
}

void Rail::did_write(size_t count, Time now) {
  last_write_ = now;
  while (!writing_.empty()) {
    Writing& first = writing_.front();
    const size_t all = kHeaderBytes + first.payload.size;
    const size_t more = std::min(count, all - first.written);
    first.written += more;
    count -= more;
    if (first.written < all) {
      return;
    }
    sent_ = std::max(sent_, first.number);
    const bool ends = is_refusing_ && writing_.size() == 1;
    writing_.pop_front();
    if (ends) {
      broken();
      return;
    }
  }
}

bool Rail::take_acknowledgement(uint64_t received) {
  if (received > sent_) {
    return false;
  }
  while (acknowledged_ < received) {
    const Header header = unacknowledged_.front().header;
    unacknowledged_.pop_front();
    if (next_to_write_ > 0) {
      --next_to_write_;
    }
    acknowledged_ = header.number;
    owner_.acknowledged(header);
  }
  return true;
}

void Rail::withdraw(const std::function<bool(const Key&)>& is_over) {
  for (auto& each : unacknowledged_) {
    if (each.header.kind == Kind::kData && is_over(each.header.key)) {
      each.header.kind = Kind::kVoid;
      each.payload = {};
    }
  }
  for (auto& each : writing_) {
    if (is_over(each.key)) {
      each.payload.copy();
    }
  }
}

void Rail::own(const Key& key) {
  std::map<uint64_t, Bytes> copies;
  for (auto& each : unacknowledged_) {
    if (each.header.kind == Kind::kData && each.header.key == key && each.payload.copy()) {
      copies[each.header.number] = each.payload;
    }
  }
  for (auto& each : writing_) {
    const auto found = copies.find(each.number);
    if (found != copies.end()) {
      each.payload = found->second;
    }
  }
}

// ---- receiving ----------------------------------------------------------------------------------

Space Rail::to_read() {
  if ((state_ != State::kGreeting && state_ != State::kOpen) || is_refusing_) {
    return {};
  }
  if (header_read_ < kHeaderBytes) {
    return {header_bytes_.data() + header_read_, kHeaderBytes - header_read_};
  }
  const size_t rest = header_.length - payload_read_;
  if (header_.kind != Kind::kData) {
    return {reinterpret_cast<uint8_t*>(payload_text_.data()) + payload_read_, rest};
  }
  if (memory_ != nullptr) {
    return {memory_ + payload_read_, rest};
  }
  nowhere_.resize(kNowhereBytes);
  return {nowhere_.data(), std::min(rest, kNowhereBytes)};
}

bool Rail::did_read(size_t count, Time now) {
  last_sign_ = now;
  if (header_read_ < kHeaderBytes) {
    header_read_ += count;
    if (header_read_ < kHeaderBytes) {
      return true;
    }
    const auto header = read_header(header_bytes_.data());
    if (!header) {
      return false;
    }
    header_ = *header;
    if (!begin_payload()) {
      return false;
    }
  } else {
    const Space space = to_read();
    checksum_ = crc32c(space.data, count, checksum_);
    payload_read_ += count;
  }
  return payload_read_ < header_.length || finish_frame();
}

bool Rail::begin_payload() {
  payload_read_ = 0;
  checksum_ = 0;
  memory_ = nullptr;
  const bool is_in_order = header_.kind == Kind::kRefusal ||
                           (header_.kind == Kind::kGreeting) == (state_ == State::kGreeting);
  if (!is_in_order || is_numbered(header_.kind) != (header_.number > 0) ||
      (header_.number > 0 && header_.number != received_ + 1) ||
      (header_.kind != Kind::kData && header_.length > kLongestText)) {
    return wrong();
  }
  if (header_.kind != Kind::kData) {
    payload_text_.assign(header_.length, '\0');
    return true;
  }
  const Place place = owner_.place(header_);
  memory_ = place.kind == Place::Kind::kMemory ? place.memory : nullptr;
  return place.kind != Place::Kind::kWrong || wrong();
}

bool Rail::wrong() {
  end(End::kWrong);
  return false;
}

bool Rail::finish_frame() {
  header_read_ = 0;
  if (checksum_ != header_.checksum) {
    return false;
  }
  if (header_.kind == Kind::kGreeting) {
    return take_greeting();
  }
  if (header_.kind == Kind::kRefusal) {
    end(End::kRefused, payload_text_);
    return false;
  }
  if (!take_acknowledgement(header_.received)) {
    return wrong();
  }
  if (header_.number == 0) {
    return true;
  }
  received_ = header_.number;
  return owner_.take(header_, payload_text_) || wrong();
}

bool Rail::take_greeting() {
  refusal_ = owner_.wrong_with(payload_text_, index_);
  if (!refusal_.empty()) {
    is_refusing_ = true;  // the connection ends once the refusal is written
    return true;
  }
  // It may not have forgotten what it had acknowledged.
  if (header_.received < acknowledged_ || !take_acknowledgement(header_.received)) {
    return wrong();
  }
  state_ = State::kOpen;
  return true;
}

void Rail::forget(const uint8_t* memory, size_t size) {
  if (header_read_ == kHeaderBytes && lies_in(memory_, memory, size)) {
    memory_ = nullptr;
  }
}

}  // namespace commhook::wire
