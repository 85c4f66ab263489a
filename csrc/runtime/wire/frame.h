// The frames in which processes send each other messages. This page is where to begin to read.
//
// Layers, each of which knows only those before it:
//   frame     what is sent on a connection: a header of 76 bytes, and a payload of at most kChunk.
//   rail      a stream of numbered frames that outlives its connections (rail.h).
//   link      the messages between two processes, in chunks over one or several rails (link.h).
//   endpoint  the sockets and the thread of a process (endpoint.h).
//   channel   the messages of a group of ranks (channel.h).
//   backend   the collectives of torch.distributed (backend.h).
// The first three have no socket, no clock and no thread. They take bytes, events and the time, and
// give bytes and completions, so that tests can cut, delay, repeat and change whatever they like.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

namespace commhook::wire {

// Nanoseconds of a clock that never goes back.
using Time = int64_t;
constexpr Time kSecond = 1'000'000'000;

// Bytes, and what keeps them; without an owner, they are a user's.
struct Bytes {
  const uint8_t* data = nullptr;
  size_t size = 0;
  std::shared_ptr<const void> owner;
  // Copies a user's bytes. Returns whether they were a user's.
  bool copy();
};

// Memory to read into.
struct Space {
  uint8_t* data = nullptr;
  size_t size = 0;
};

// What tells the messages of a link apart. Each is sent once.
struct Key {
  uint64_t channel = 0;  // a digest of a group's name
  uint32_t epoch = 0;    // of the channel: a failure ends it, and begins the next one
  uint32_t slot = 0;
  uint32_t stage = 0;

  [[nodiscard]] auto tied() const { return std::tie(channel, epoch, slot, stage); }
  bool operator<(const Key& other) const { return tied() < other.tied(); }
  bool operator==(const Key& other) const { return tied() == other.tied(); }
};

// What both sides of a message must agree on.
struct Shape {
  uint64_t total = 0;  // bytes
  uint32_t form = 0;   // a digest of what else there is
  bool operator==(const Shape& other) const { return total == other.total && form == other.form; }
  bool operator!=(const Shape& other) const { return !(*this == other); }
};

enum class Kind : uint32_t {
  kGreeting = 1,  // the first frame of a connection; its payload says who sends it
  kRefusal,       // the answer to a greeting that does not fit; its payload says why
  kNothing,       // acknowledges frames, and shows that the process runs
  kData,          // a chunk of a message
  kReady,         // the sender of the frame has memory for a message: all of it may come
  kMisfit,        // the sender of the frame expected another shape: this one
  kEpoch,         // a channel's epochs before this one are over; the payload says why
  kLeft,          // the sender of the frame has left a channel, and sends and receives nothing more
  kVoid,          // in place of a frame whose message is over
};

// The most bytes of a payload. A frame that must not wait, waits for one of this length.
constexpr uint32_t kChunk = 256 * 1024;
constexpr size_t kHeaderBytes = 76;
// The most bytes of a payload that is a text.
constexpr uint32_t kLongestText = 16 * 1024;

struct Header {
  Kind kind = Kind::kNothing;
  Key key;
  uint64_t number = 0;    // of the frame on its rail, from 1; 0: never sent again
  uint64_t received = 0;  // all frames of the other side up to this number have come
  Shape shape;            // the message's
  uint64_t offset = 0;    // of the payload in the message
  uint32_t length = 0;    // of the payload
  uint32_t checksum = 0;  // of the payload
};

// A frame to send. Its payload must not change until the other side has it.
struct Frame {
  Header header;
  Bytes payload;
};

// A frame whose payload is a text, of at most kLongestText bytes.
Frame text_frame(Kind kind, std::string text);

// Writes kHeaderBytes.
void write_header(const Header& header, uint8_t* to);

// Reads kHeaderBytes; nothing if they are no header, or have changed on the way.
std::optional<Header> read_header(const uint8_t* from);

// CRC-32C (Castagnoli) of bytes that follow those with the checksum before.
uint32_t crc32c(const uint8_t* data, size_t size, uint32_t before = 0);

}  // namespace commhook::wire
