#include "runtime/wire/frame.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace commhook::wire {
namespace {

constexpr uint32_t kMagic = 0x31574843;  // "CHW1"
constexpr size_t kChecked = kHeaderBytes - sizeof(uint32_t);

// In the order in which they are sent.
template <typename SomeHeader, typename Field>
void each_field(SomeHeader& header, const Field& field) {
  field(header.kind);
  field(header.key.channel);
  field(header.key.epoch);
  field(header.key.slot);
  field(header.key.stage);
  field(header.length);
  field(header.number);
  field(header.received);
  field(header.shape.total);
  field(header.shape.form);
  field(header.offset);
  field(header.checksum);
}

// Numbers are little-endian on all machines.
template <typename T>
uint8_t* put(T value, uint8_t* to) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    to[i] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i));
  }
  return to + sizeof(T);
}

template <typename T>
const uint8_t* get(T& value, const uint8_t* from) {
  uint64_t found = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    found |= static_cast<uint64_t>(from[i]) << (8 * i);
  }
  value = static_cast<T>(found);
  return from + sizeof(T);
}

std::array<uint32_t, 256> table() {
  std::array<uint32_t, 256> found{};
  for (uint32_t byte = 0; byte < found.size(); ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1) != 0 ? 0x82F63B78U : 0U);
    }
    found[byte] = value;
  }
  return found;
}

uint32_t by_table(const uint8_t* data, size_t size, uint32_t value) {
  static const auto kTable = table();
  for (size_t i = 0; i < size; ++i) {
    value = (value >> 8) ^ kTable[(value ^ data[i]) & 0xFF];
  }
  return value;
}

// An instruction gives its result after three cycles, and can begin in each: three parts of the
// bytes are summed at the same time.
constexpr size_t kLane = 4096;

#if defined(__x86_64__)
#define COMMHOOK_WITH_CRC __attribute__((target("sse4.2")))
COMMHOOK_WITH_CRC inline uint32_t crc_word(uint32_t value, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(value, word));
}
COMMHOOK_WITH_CRC inline uint32_t crc_byte(uint32_t value, uint8_t byte) {
  return _mm_crc32_u8(value, byte);
}
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#define COMMHOOK_WITH_CRC
inline uint32_t crc_word(uint32_t value, uint64_t word) { return __crc32cd(value, word); }
inline uint32_t crc_byte(uint32_t value, uint8_t byte) { return __crc32cb(value, byte); }
bool has_instruction() { return true; }
#else
#define COMMHOOK_WITH_CRC
inline uint32_t crc_word(uint32_t value, uint64_t) { return value; }
inline uint32_t crc_byte(uint32_t value, uint8_t) { return value; }
bool has_instruction() { return false; }
#endif

// Tables that give the checksum of bytes followed by kLane zeros.
std::array<std::array<uint32_t, 256>, 4> zeros_tables() {
  const std::vector<uint8_t> zeros(kLane);
  std::array<uint32_t, 32> of_bit{};
  for (uint32_t bit = 0; bit < 32; ++bit) {
    of_bit[bit] = by_table(zeros.data(), kLane, 1U << bit);
  }
  std::array<std::array<uint32_t, 256>, 4> found{};
  for (uint32_t part = 0; part < 4; ++part) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (uint32_t bit = 0; bit < 8; ++bit) {
        found[part][byte] ^= ((byte >> bit) & 1) != 0 ? of_bit[part * 8 + bit] : 0;
      }
    }
  }
  return found;
}

uint32_t after_zeros(uint32_t value) {
  static const auto kTables = zeros_tables();
  return kTables[0][value & 0xFF] ^ kTables[1][(value >> 8) & 0xFF] ^
         kTables[2][(value >> 16) & 0xFF] ^ kTables[3][value >> 24];
}

uint64_t word_at(const uint8_t* data) {
  uint64_t word = 0;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

COMMHOOK_WITH_CRC uint32_t by_instruction(const uint8_t* data, size_t size, uint32_t value) {
  for (; size >= 3 * kLane; size -= 3 * kLane, data += 3 * kLane) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t at = 0; at < kLane; at += sizeof(uint64_t)) {
      value = crc_word(value, word_at(data + at));
      second = crc_word(second, word_at(data + kLane + at));
      third = crc_word(third, word_at(data + 2 * kLane + at));
    }
    value = after_zeros(after_zeros(value) ^ second) ^ third;
  }
  for (; size >= sizeof(uint64_t); size -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    value = crc_word(value, word_at(data));
  }
  for (; size > 0; --size, ++data) {
    value = crc_byte(value, *data);
  }
  return value;
}

}  // namespace

uint32_t crc32c(const uint8_t* data, size_t size, uint32_t before) {
  static const bool kHasInstruction = has_instruction();
  const uint32_t value = ~before;
  return ~(kHasInstruction ? by_instruction(data, size, value) : by_table(data, size, value));
}

bool Bytes::copy() {
  if (owner || size == 0) {
    return false;
  }
  const auto copied = std::make_shared<const std::vector<uint8_t>>(data, data + size);
  data = copied->data();
  owner = copied;
  return true;
}

Frame text_frame(Kind kind, std::string text) {
  if (text.size() > kLongestText) {
    size_t size = kLongestText;
    while (size > 0 && (static_cast<uint8_t>(text[size]) & 0xC0) == 0x80) {
      --size;  // not in the middle of a character of UTF-8
    }
    text.resize(size);
  }
  Frame frame;
  frame.header.kind = kind;
  const auto owner = std::make_shared<const std::string>(std::move(text));
  frame.payload = {reinterpret_cast<const uint8_t*>(owner->data()), owner->size(), owner};
  return frame;
}

void write_header(const Header& header, uint8_t* to) {
  uint8_t* at = put(kMagic, to);
  each_field(header, [&at](auto value) { at = put(value, at); });
  put(crc32c(to, kChecked), at);
}

std::optional<Header> read_header(const uint8_t* from) {
  uint32_t magic = 0;
  uint32_t checksum = 0;
  Header header;
  const uint8_t* at = get(magic, from);
  each_field(header, [&at](auto& value) { at = get(value, at); });
  get(checksum, at);
  if (magic != kMagic || checksum != crc32c(from, kChecked) || header.length > kChunk ||
      header.kind < Kind::kGreeting || header.kind > Kind::kVoid) {
    return std::nullopt;
  }
  return header;
}

}  // namespace commhook::wire
