#include "runtime/wire/frame.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace commhook::wire {
namespace {

constexpr uint32_t kMagic = 0x31574843;  // "CHW1"
constexpr size_t kChecked = kHeaderBytes - sizeof(uint32_t);

// Numbers are little-endian on all machines.
template <typename T>
uint8_t* put(T value, uint8_t* to) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    to[i] = static_cast<uint8_t>(value >> (8 * i));
  }
  return to + sizeof(T);
}

template <typename T>
const uint8_t* get(T& value, const uint8_t* from) {
  value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value |= static_cast<T>(static_cast<T>(from[i]) << (8 * i));
  }
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

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t* data, size_t size,
                                                          uint32_t value) {
  uint64_t wide = value;
  for (; size >= sizeof(uint64_t); size -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data, sizeof(word));
    wide = _mm_crc32_u64(wide, word);
  }
  value = static_cast<uint32_t>(wide);
  for (; size > 0; --size, ++data) {
    value = _mm_crc32_u8(value, *data);
  }
  return value;
}

bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
uint32_t by_instruction(const uint8_t* data, size_t size, uint32_t value) {
  for (; size >= sizeof(uint64_t); size -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data, sizeof(word));
    value = __crc32cd(value, word);
  }
  for (; size > 0; --size, ++data) {
    value = __crc32cb(value, *data);
  }
  return value;
}

bool has_instruction() { return true; }
#else
uint32_t by_instruction(const uint8_t* data, size_t size, uint32_t value) {
  return by_table(data, size, value);
}

bool has_instruction() { return false; }
#endif

}  // namespace

uint32_t crc32c(const uint8_t* data, size_t size, uint32_t before) {
  static const bool kHasInstruction = has_instruction();
  const uint32_t value = ~before;
  return ~(kHasInstruction ? by_instruction(data, size, value) : by_table(data, size, value));
}

Frame text_frame(Kind kind, std::string text) {
  text.resize(std::min<size_t>(text.size(), kLongestText));
  Frame frame;
  frame.header.kind = kind;
  const auto owner = std::make_shared<const std::string>(std::move(text));
  frame.payload = {reinterpret_cast<const uint8_t*>(owner->data()), owner->size(), owner};
  return frame;
}

void write_header(const Header& header, uint8_t* to) {
  uint8_t* at = put(kMagic, to);
  at = put(static_cast<uint32_t>(header.kind), at);
  at = put(header.key.channel, at);
  at = put(header.key.epoch, at);
  at = put(header.key.slot, at);
  at = put(header.key.stage, at);
  at = put(header.length, at);
  at = put(header.number, at);
  at = put(header.received, at);
  at = put(header.total, at);
  at = put(header.offset, at);
  at = put(header.checksum, at);
  put(crc32c(to, kChecked), at);
}

std::optional<Header> read_header(const uint8_t* from) {
  uint32_t magic = 0;
  uint32_t kind = 0;
  uint32_t checksum = 0;
  Header header;
  const uint8_t* at = get(magic, from);
  at = get(kind, at);
  at = get(header.key.channel, at);
  at = get(header.key.epoch, at);
  at = get(header.key.slot, at);
  at = get(header.key.stage, at);
  at = get(header.length, at);
  at = get(header.number, at);
  at = get(header.received, at);
  at = get(header.total, at);
  at = get(header.offset, at);
  at = get(header.checksum, at);
  get(checksum, at);
  if (magic != kMagic || checksum != crc32c(from, kChecked) || header.length > kChunk ||
      kind < static_cast<uint32_t>(Kind::kGreeting) || kind > static_cast<uint32_t>(Kind::kVoid)) {
    return std::nullopt;
  }
  header.kind = static_cast<Kind>(kind);
  return header;
}

}  // namespace commhook::wire
