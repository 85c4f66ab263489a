// A stream of numbered frames between two processes that outlives its connections.
//
// States, and what holds in each:
//   kBroken    There is no connection. The time of the last sign of the other side is kept.
//   kGreeting  There is a connection; greetings are under way. No other frame is sent or accepted.
//   kOpen      Both greetings have come and fit. Numbered frames flow.
//   kEnded     For good; end() says why. Nothing is sent or accepted.
//
// What holds in all of them:
//   - Numbers are given in the order in which frames are first written, without gaps, from 1.
//   - unacknowledged_ has the numbered frames that the other side may not have, in order. The first
//     next_to_write_ of them have been written to this connection, whole or in part.
//   - Each frame up to number received_ has been taken once, in order; none above it has.
//   - A connection with a wrong byte is given up. The next one begins with greetings, which say the
//     last number received; what came after it is written again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "runtime/wire/frame.h"

namespace commhook::wire {

// A connection without any other bytes carries a frame this often.
constexpr Time kHeartbeat = kSecond;
// What has come is acknowledged after so many frames or so long, unless another frame says it.
constexpr uint64_t kFramesPerAcknowledgement = 8;
constexpr Time kLongestUnacknowledged = kSecond / 20;

class Rail {
 public:
  enum class State : uint8_t { kBroken, kGreeting, kOpen, kEnded };
  enum class End : uint8_t {
    kNone,
    kRefused,  // the greetings do not fit
    kStopped,  // the other side's process has ended: nobody listens at its address
    kLost,     // no sign of the other side's host for too long
    kWrong,    // the other side breaks the protocol: checksums are right, and frames are not
  };
  // Where a payload goes.
  struct Place {
    enum class Kind : uint8_t { kMemory, kNowhere, kWrong } kind = Kind::kNowhere;
    uint8_t* memory = nullptr;
  };

  // The link that a rail belongs to.
  class Owner {
   public:
    Owner() = default;
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;
    virtual ~Owner() = default;

    // The payload of this side's greeting.
    [[nodiscard]] virtual std::string greeting(size_t rail) const = 0;
    // Why the other side's greeting does not fit; empty if it does.
    [[nodiscard]] virtual std::string wrong_with(const std::string& greeting,
                                                 size_t rail) const = 0;
    // The next frame to send; false if there is none now. has_others: whether others are sent, too.
    virtual bool next(Frame& frame, bool has_others) = 0;
    // Where the payload of a data frame goes.
    virtual Place place(const Header& header) = 0;
    // A numbered frame that has come whole and unchanged, also one whose payload went nowhere.
    // text: its payload, except for data. Returns whether it fits; else the rail ends.
    virtual bool take(const Header& header, const std::string& text) = 0;
    // The other side has a frame.
    virtual void acknowledged(const Header& header) = 0;
  };

  // index: among the link's rails.
  Rail(Owner& owner, size_t index) : owner_(owner), index_(index) {}

  // There is a new connection, without bytes in it yet.
  void connected(Time now);
  // The connection has ended, or a byte in it was wrong. Without one, nothing changes.
  void broken();
  // There was another sign of the other side.
  void saw(Time now) { last_sign_ = now; }
  // Nothing more is sent or accepted.
  void end(End why, std::string text = "");

  // Where the next bytes of the connection go; empty if none may come.
  Space to_read();
  // So many bytes are there. False if the connection must be closed: bytes are wrong, or the rail
  // has ended.
  [[nodiscard]] bool did_read(size_t count, Time now);

  // The next bytes to write, in order, at least as many as `enough` if there are.
  void to_write(std::vector<Bytes>& found, size_t enough, Time now);
  // The first so many of them are written.
  void did_write(size_t count, Time now);

  // Directs the rest of a payload that is being read into memory of this range to nowhere.
  void forget(const uint8_t* memory, size_t size);
  // Copies what the other side may lack of a message whose payloads have no owner. Then its memory
  // may change.
  void own(const Key& key);
  // Sends nothing in place of the data frames of such messages, of which no memory is read again.
  void withdraw(const std::function<bool(const Key&)>& is_over);

  [[nodiscard]] State state() const { return state_; }
  [[nodiscard]] End end() const { return end_; }
  // Why the rail has ended, in the other side's words.
  [[nodiscard]] const std::string& text() const { return text_; }
  // When the other side last showed that it is there.
  [[nodiscard]] Time last_sign() const { return last_sign_; }
  // Whether frames have come that were not acknowledged.
  [[nodiscard]] bool owes_acknowledgement() const { return told_ < received_; }
  // Whether the other side has all that was sent.
  [[nodiscard]] bool is_acknowledged() const { return unacknowledged_.empty(); }
  // The number of the last frame, and of the last one that the other side has.
  [[nodiscard]] uint64_t last_number() const { return last_number_; }
  [[nodiscard]] uint64_t acknowledged() const { return acknowledged_; }

 private:
  // A frame that is being written.
  struct Writing {
    std::array<uint8_t, kHeaderBytes> header;
    Bytes payload;
    size_t written = 0;  // of header and payload together
    uint64_t number = 0;
    Key key;
  };

  void write(Frame& frame, Time now);
  bool begin_payload();
  bool finish_frame();
  bool wrong();
  bool take_acknowledgement(uint64_t received);
  bool take_greeting();

  Owner& owner_;
  const size_t index_;
  State state_ = State::kBroken;
  End end_ = End::kNone;
  std::string text_;
  Time last_sign_ = 0;

  // Sending.
  std::deque<Frame> unacknowledged_;
  size_t next_to_write_ = 0;  // in unacknowledged_
  uint64_t last_number_ = 0;  // that was given
  uint64_t sent_ = 0;         // the last number of a frame that was written whole, ever
  uint64_t acknowledged_ = 0;
  std::deque<Writing> writing_;
  bool must_greet_ = false;
  std::string refusal_;  // to send, before the rail ends
  bool is_refusing_ = false;
  Time last_write_ = 0;
  Time told_at_ = 0;

  // Receiving.
  uint64_t received_ = 0;
  uint64_t told_ = 0;  // the last value of received_ in a header of this connection
  std::array<uint8_t, kHeaderBytes> header_bytes_{};
  size_t header_read_ = 0;
  Header header_;
  size_t payload_read_ = 0;
  uint8_t* memory_ = nullptr;  // null: nowhere
  uint32_t checksum_ = 0;
  std::string payload_text_;
  std::vector<uint8_t> nowhere_;
};

}  // namespace commhook::wire
