// The messages between two processes.
//
// A message is cut into chunks of kChunk bytes, the last one shorter; a message without bytes has
// one, of none. Whichever rail has room takes the next chunk. So chunks of a message arrive in any
// order, and each goes straight to its place in the memory that waits for it.
//
// A message whose receiver has no memory yet is kept there, up to a credit: a sender sends at most
// so many bytes, with kMessageCost for each chunk, of messages for which it has not been told
// kReady. All other messages pass those that wait for it.
//
// What holds at all times:
//   - Each message that both sides know is completed once on each, with equal shapes, or both learn
//     that it does not fit. A message is sent, for its sender, once all of it has been given to
//     rails: these copy what the other side may lack, since waiting for it takes a round trip.
//   - No memory of a message that has completed, or whose epoch is over, is read or written.
//   - What is kept for receives that have not come is within the credit.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/wire/frame.h"
#include "runtime/wire/rail.h"

namespace commhook::wire {

constexpr size_t kCredit = 32 * 1024 * 1024;
constexpr size_t kMessageCost = 256;
// Of a message of so many bytes its receiver says later that it may come.
constexpr size_t kSmall = 4096;
constexpr size_t kMostUnhurried = 64;
// The most messages that the other side has announced as ready, and the most channels that have
// failed, of which this side knows nothing yet.
constexpr size_t kMostRemembered = 1 << 16;

class Link : private Rail::Owner {
 public:
  enum class Result : uint8_t {
    kDone,       // sent: its memory may change; received: it is in the memory
    kMisfit,     // the other side has another shape
    kEpochOver,  // its epoch has ended
    kEnded,      // the link has ended
  };
  struct Completion {
    uint64_t id;
    Result result;
  };
  // What the other process says of a channel, or a message that does not fit.
  struct Notice {
    Kind kind;  // kEpoch, kMisfit or kLeft
    Key key;
    std::string text;
    bool is_sent = false;  // of a misfit: whether this side has sent the message
    Shape own;             // of a misfit: what this side has
    Shape other;
  };
  // The payload of a rail's greeting.
  using Greeting = std::function<std::string(size_t rail)>;
  // Why the other side's greeting does not fit; empty if it does.
  using Check = std::function<std::string(const std::string& greeting, size_t rail)>;

  Link(size_t rails, Greeting greeting, Check check, size_t credit = kCredit);

  Rail& rail(size_t index) { return *rails_[index]; }
  [[nodiscard]] const Rail& rail(size_t index) const { return *rails_[index]; }

  // Begin to send or receive a message; a completion with the id follows. Of each key there is one
  // in each direction. The memory must not change, or be read, until the completion.
  void send(uint64_t id, const Key& key, const uint8_t* data, Shape shape);
  void receive(uint64_t id, const Key& key, uint8_t* memory, Shape shape);
  // Ends the messages of a channel's older epochs on both sides.
  void begin_epoch(uint64_t channel, uint32_t epoch, std::string why);
  // Ends the messages of a channel that are not complete, for good. What is complete still arrives.
  void abandon(uint64_t channel);
  // Says why, once, after what is complete. The messages for which the other side waits then end.
  // The other side's notice has this key, whose slot and stage say what the caller likes.
  void leave(const Key& key, std::string why);
  // Sends what has waited for other frames. Ends the link if a rail has ended, or if no rail has
  // had a sign for so long.
  void tick(Time now, Time lost_after);
  // Ends the link. A message that has come before its receive can still be received.
  void end(Rail::End why, const std::string& text);

  [[nodiscard]] std::vector<Completion> take_completions();
  [[nodiscard]] std::vector<Notice> take_notices();
  [[nodiscard]] Rail::End ended() const { return end_; }
  [[nodiscard]] const std::string& end_text() const { return end_text_; }
  // Bytes of messages that are kept for receives to come, with what each chunk costs.
  [[nodiscard]] size_t kept_bytes() const { return kept_; }
  // The credit that messages use of which the other side has not said that it has memory for them.
  [[nodiscard]] size_t credit_used() const { return credit_used_; }
  // Whether the other side has all that was sent.
  [[nodiscard]] bool is_acknowledged() const;

 private:
  struct Outgoing {
    uint64_t id = 0;
    const uint8_t* data = nullptr;
    Shape shape;
    uint64_t next = 0;      // the offset of the next chunk
    bool is_given = false;  // all chunks to rails: it is complete
    bool is_ready = false;
    size_t credit = 0;  // that it uses
  };
  // That this side has left a channel, to send when the other one has what was sent before.
  struct Leaving {
    Key key;
    std::string why;
    std::vector<uint64_t> numbers;  // of the last frame, by rail
  };
  struct Early {
    std::vector<uint8_t> bytes;
    bool is_whole = false;
  };
  struct Incoming {
    uint64_t id = 0;
    Shape shape;
    uint8_t* memory = nullptr;
    bool is_posted = false;
    bool is_over = false;             // a misfit: what comes is dropped
    std::vector<bool> has;            // of each chunk, once posted
    uint64_t count = 0;               // of these that are there
    std::map<uint64_t, Early> early;  // by offset
  };

  [[nodiscard]] std::string greeting(size_t rail) const override { return greeting_(rail); }
  [[nodiscard]] std::string wrong_with(const std::string& greeting, size_t rail) const override {
    return check_(greeting, rail);
  }
  bool next(Frame& frame, bool has_others) override;
  Rail::Place place(const Header& header) override;
  bool take(const Header& header, const std::string& text) override;
  void acknowledged(const Header& header) override;

  [[nodiscard]] bool may_send(const Outgoing& outgoing) const;
  void control(Kind kind, const Key& key, Shape shape, std::string text = "");
  void complete(uint64_t id, Result result);
  void finish_if_whole(const Key& key, Incoming& incoming);
  bool take_data(const Header& header);
  bool take_ready(const Key& key, Shape shape);
  bool take_epoch(uint64_t channel, uint32_t epoch);
  size_t end_epochs(uint64_t channel, uint32_t epoch);
  bool take_left(uint64_t channel);
  void say_left();
  void withdraw(const std::function<bool(const Key&)>& goes);
  void misfit(const Key& key, Incoming& incoming, Shape other);
  void forget(const uint8_t* memory, size_t size);
  void drop_early(Incoming& incoming);
  void drop(Incoming& incoming, Result result);
  [[nodiscard]] bool is_over(const Key& key) const;

  const Greeting greeting_;
  const Check check_;
  const size_t credit_;
  std::vector<std::unique_ptr<Rail>> rails_;
  std::map<Key, Outgoing> sending_;
  std::deque<Key> queue_;  // messages of which chunks are left to give
  std::deque<Frame> control_;
  // That small messages may come. Few wait for it, so that it goes with other frames.
  std::deque<Frame> unhurried_;
  std::map<Key, Shape> ready_;  // of messages that may come and were not sent yet
  std::map<Key, Incoming> incoming_;
  // Channels that this side has left and the other one has not, with the credit used there.
  std::map<uint64_t, size_t> left_;
  std::set<uint64_t> others_left_;  // the reverse
  std::deque<Leaving> leaving_;
  std::map<uint64_t, uint32_t> epochs_;  // the oldest epoch of a channel that is not over
  std::vector<Completion> completions_;
  std::vector<Notice> notices_;
  size_t credit_used_ = 0;
  // The credit of ended epochs that the other side may still keep, by channel and new epoch.
  std::map<std::pair<uint64_t, uint32_t>, size_t> owed_;
  size_t kept_ = 0;
  Rail::End end_ = Rail::End::kNone;
  std::string end_text_;
};

}  // namespace commhook::wire
