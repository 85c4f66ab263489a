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
//   - Each message that both sides know is completed once on each, with equal lengths, or with
//     kMisfit on both.
//   - No memory of a message that has completed, or whose epoch is over, is read or written.
//   - What is kept for receives that have not come is within the credit.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/wire/frame.h"
#include "runtime/wire/rail.h"

namespace commhook::wire {

constexpr size_t kCredit = 32 * 1024 * 1024;
constexpr size_t kMessageCost = 256;
// The most messages that the other side has announced as ready, and the most channels that have
// failed, of which this side knows nothing yet.
constexpr size_t kMostRemembered = 1 << 16;

class Link : private Rail::Owner {
 public:
  enum class Result : uint8_t {
    kDone,       // sent: the other process has all of it; received: it is in the memory
    kMisfit,     // the other side has another length
    kEpochOver,  // its epoch has ended
    kEnded,      // the link has ended
  };
  struct Completion {
    uint64_t id;
    Result result;
    uint64_t other_size;  // of a misfit: what the other side has
  };
  // What the other process says of a channel, or of itself.
  struct Notice {
    Kind kind;  // kEpoch, kMisfit or kGoodbye
    Key key;
    uint64_t total;  // of a misfit: what it expected
    std::string text;
  };
  // Why the other side's greeting does not fit; empty if it does.
  using Check = std::function<std::string(const std::string& greeting)>;

  Link(size_t rails, std::string greeting, Check check, size_t credit = kCredit);

  [[nodiscard]] size_t rails() const { return rails_.size(); }
  Rail& rail(size_t index) { return *rails_[index]; }

  // Begin to send or receive a message; a completion with the id follows. Of each key there is one
  // in each direction. The bytes must not change until the completion, or until keep().
  void send(uint64_t id, const Key& key, Bytes bytes);
  void receive(uint64_t id, const Key& key, Space space);
  // Copies what the other process may still lack of this memory, which may change afterwards.
  void keep(const uint8_t* memory, size_t size);
  // Ends the messages of a channel's older epochs on both sides.
  void begin_epoch(uint64_t channel, uint32_t epoch, std::string why);
  // Says that this process leaves.
  void say_goodbye() { control(Kind::kGoodbye, {}, 0); }
  // Ends the link if a rail has ended, or if no rail has had a sign for so long.
  void tick(Time now, Time lost_after);
  // Ends the link.
  void end(Rail::End why, const std::string& text);

  [[nodiscard]] std::vector<Completion> take_completions();
  [[nodiscard]] std::vector<Notice> take_notices();
  [[nodiscard]] Rail::End ended() const { return end_; }
  [[nodiscard]] const std::string& end_text() const { return end_text_; }
  // Bytes of messages that are kept for receives to come, with what each chunk costs.
  [[nodiscard]] size_t kept_bytes() const { return kept_; }
  // Whether a rail would be given a frame now.
  [[nodiscard]] bool has_frames() const;

 private:
  struct Outgoing {
    uint64_t id;
    Bytes bytes;
    uint64_t next = 0;          // the offset of the next chunk
    bool is_begun = false;      // a chunk has been given to a rail
    uint64_t acknowledged = 0;  // chunks
    bool is_ready = false;
    bool is_complete = false;  // its completion is given
    size_t credit = 0;         // that it uses
    [[nodiscard]] bool is_given() const { return is_begun && next == bytes.size; }
  };
  struct Early {
    std::vector<uint8_t> bytes;
    bool is_whole = false;
  };
  struct Incoming {
    uint64_t id = 0;
    uint64_t total = 0;
    uint8_t* memory = nullptr;
    bool is_posted = false;
    bool is_over = false;             // a misfit: what comes is dropped
    std::vector<bool> has;            // of each chunk, once posted
    uint64_t count = 0;               // of these that are there
    std::map<uint64_t, Early> early;  // by offset
  };

  [[nodiscard]] std::string greeting() const override { return greeting_; }
  [[nodiscard]] std::string wrong_with(const std::string& greeting) const override {
    return check_(greeting);
  }
  bool next(Frame& frame) override;
  Rail::Place place(const Header& header) override;
  bool take(const Header& header, const std::string& text) override;
  void acknowledged(const Header& header) override;

  [[nodiscard]] bool may_send(const Outgoing& outgoing) const;
  void control(Kind kind, const Key& key, uint64_t total, std::string text = "");
  void complete(uint64_t id, Result result, uint64_t other_size = 0);
  void finish_if_whole(const Key& key, Incoming& incoming);
  bool take_data(const Header& header);
  bool take_ready(const Key& key, uint64_t total);
  void take_misfit(const Key& key, uint64_t total);
  bool take_epoch(uint64_t channel, uint32_t epoch);
  size_t end_epochs(uint64_t channel, uint32_t epoch);
  void misfit(const Key& key, Incoming& incoming, uint64_t total);
  void drop_early(Incoming& incoming);
  void drop(Incoming& incoming, Result result);
  size_t drop(Outgoing& outgoing, Result result);
  [[nodiscard]] bool is_over(const Key& key) const;

  const std::string greeting_;
  const Check check_;
  const size_t credit_;
  std::vector<std::unique_ptr<Rail>> rails_;
  std::map<Key, Outgoing> sending_;
  std::deque<Key> queue_;  // messages of which chunks are left to give
  std::deque<Frame> control_;
  std::map<Key, uint64_t> ready_;  // lengths of messages that may come and were not sent yet
  std::map<Key, Incoming> incoming_;
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
