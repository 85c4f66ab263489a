// Random histories of two links whose connections are cut, delayed and changed.
//
//   wire_histories SEED COUNT           random use of two links
//   wire_histories SEED COUNT hostile   one link, and random frames with right checksums
//
// Ends with "N histories", or with what was wrong.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "runtime/wire/link.h"

using namespace commhook::wire;

namespace {

constexpr size_t kCreditHere = 3 * (kChunk + kMessageCost);

uint64_t seed_of_history = 0;
uint64_t frames_taken = 0;  // of those of hostile processes

void require(bool is_right, const char* what) {
  if (!is_right) {
    std::printf("WRONG in history %llu: %s\n", static_cast<unsigned long long>(seed_of_history),
                what);
    std::exit(1);
  }
}

uint8_t byte_of(const Key& key, int from, size_t at) {
  uint64_t mixed = key.channel * 31 + key.epoch * 131 + key.slot * 1009 + key.stage * 17 + from;
  mixed = (mixed + at / 3) * 0x9E3779B97F4A7C15ULL;
  return static_cast<uint8_t>(mixed >> 40);
}

using Memory = std::vector<uint8_t>;

std::string greeting(int side, size_t rail) {
  return (side == 0 ? "left" : "right") + std::to_string(rail);
}

struct Operation {
  Key key;
  bool is_send = false;
  bool fits = true;  // the other side has the same length
  std::shared_ptr<Memory> memory;
};

struct Side {
  std::unique_ptr<Link> link;
  std::map<uint64_t, Operation> open;  // by id
  std::map<uint64_t, uint32_t> epochs;
};

// One direction of a connection.
struct Pipe {
  std::deque<uint8_t> bytes;
  bool has_ended = false;  // after these bytes
};

class History {
 public:
  explicit History(uint64_t seed) : random_(seed) {
    const size_t rails = 1 + pick(3);
    for (int side = 0; side < 2; ++side) {
      sides_[side].link = std::make_unique<Link>(
          rails, [side](size_t rail) { return greeting(side, rail); },
          [side](const std::string& text, size_t rail) {
            return text == greeting(1 - side, rail) ? "" : "not the other side";
          },
          kCreditHere);
    }
    for (auto& each : pipes_) {
      each.resize(rails);
    }
    is_connected_.assign(rails, false);
  }

  void run() {
    const size_t steps = 40 + pick(400);
    for (size_t i = 0; i < steps; ++i) {
      step();
      check();
    }
    // No more faults: everything that both sides have begun ends.
    for (auto& [key, lengths] : waiting_) {
      post(key, lengths);
    }
    waiting_.clear();
    finish();
    // One side leaves a channel to which the other one has sent.
    send({2, 0, ++slot_, 0}, {1, 1 + pick(2 * kChunk), 0, true});
    for (uint64_t turns = pick(3); turns > 0; --turns) {
      write(1, 0, 1 + pick(kChunk));
      read(0, 0, 1 + pick(kChunk));
    }
    sides_[0].link->abandon(2);
    sides_[0].link->leave({2, 0, 3, 4}, "enough");
    finish();
    require(sides_[0].link->kept_bytes() == 0 && sides_[1].link->kept_bytes() == 0,
            "bytes of messages are kept that have ended");
    require(sides_[0].link->credit_used() == 0 && sides_[1].link->credit_used() == 0,
            "messages that have ended use credit");
    for (int side = 0; side < 2; ++side) {
      for (const auto& key : misfits_[side]) {
        require(misfits_[1 - side].count(key) > 0 || key.epoch < sides_[0].epochs[key.channel],
                "one side alone knows of a misfit");
      }
    }
  }

 private:
  uint64_t pick(uint64_t below) { return random_() % below; }
  bool happens(int percent) { return pick(100) < static_cast<uint64_t>(percent); }

  size_t length() {
    switch (pick(6)) {
      case 0:
        return 0;
      case 1:
        return kChunk * pick(3);
      case 2:
        return kChunk + 1 + pick(kChunk);
      default:
        return pick(3000);
    }
  }

  void finish() {
    for (int round = 0; round < 20000 && !is_done(); ++round) {
      now_ += kSecond / 10;
      for (size_t rail = 0; rail < is_connected_.size(); ++rail) {
        connect(rail);
        for (int side = 0; side < 2; ++side) {
          write(side, rail, 1 << 20);
          read(side, rail, 1 << 20);
        }
      }
      check();
    }
    require(is_done(), "a message did not end");
  }

  // A message from a side, of which each side has posted its part or not.
  struct Pending {
    int from;
    size_t sent;
    size_t expected;
    bool sends_first;
  };

  void step() {
    now_ += static_cast<Time>(pick(kSecond / 20));
    const size_t rail = pick(is_connected_.size());
    const int side = static_cast<int>(pick(2));
    switch (pick(16)) {
      case 0:
      case 1:
        begin();
        break;
      case 2:
        if (!waiting_.empty()) {
          auto each = waiting_.begin();
          std::advance(each, pick(waiting_.size()));
          post(each->first, each->second);
          waiting_.erase(each);
        }
        break;
      case 3:
        if (happens(20)) {
          cut(rail);
        }
        break;
      case 4:
        if (happens(20)) {
          flip(side, rail);
        }
        break;
      case 5:
        if (happens(25)) {
          fail(side);
        }
        break;
      case 6:
      case 7:
        connect(rail);
        break;
      default:
        write(side, rail, 1 + pick(happens(50) ? 200 : 600000));
        read(1 - side, rail, 1 + pick(happens(50) ? 200 : 600000));
    }
  }

  void begin() {
    const uint64_t channel = pick(2);
    Key key{channel, std::max(sides_[0].epochs[channel], sides_[1].epochs[channel]), ++slot_,
            static_cast<uint32_t>(pick(2))};
    Pending pending{static_cast<int>(pick(2)), length(), 0, happens(50)};
    pending.expected = happens(7) ? length() : pending.sent;
    if (pending.sends_first) {
      send(key, pending);
    } else {
      receive(key, pending);
    }
    waiting_.emplace(key, pending);
  }

  // The other side's part.
  void post(const Key& key, const Pending& pending) {
    if (pending.sends_first) {
      receive(key, pending);
    } else {
      send(key, pending);
    }
  }

  void send(const Key& key, const Pending& pending) {
    Side& side = sides_[pending.from];
    auto memory = std::make_shared<Memory>(pending.sent + 1);
    for (size_t i = 0; i < pending.sent; ++i) {
      (*memory)[i] = byte_of(key, pending.from, i);
    }
    side.open[++id_] = {key, true, pending.sent == pending.expected, memory};
    side.link->send(id_, key, memory->data(), {pending.sent, 7});
    settle(pending.from);
  }

  void receive(const Key& key, const Pending& pending) {
    const int to = 1 - pending.from;
    auto memory = std::make_shared<Memory>(pending.expected);
    sides_[to].open[++id_] = {key, false, pending.sent == pending.expected, memory};
    sides_[to].link->receive(id_, key, memory->data(), {pending.expected, 7});
    settle(to);
  }

  // Takes what has completed; the memory may then be used for something else.
  void settle(int number) {
    Side& side = sides_[number];
    for (const auto& each : side.link->take_completions()) {
      const auto found = side.open.find(each.id);
      require(found != side.open.end(), "an operation completed twice");
      Operation& operation = found->second;
      if (each.result == Link::Result::kDone) {
        if (!operation.is_send) {
          require(operation.fits, "a message of another length was received");
          for (size_t i = 0; i < operation.memory->size(); ++i) {
            require((*operation.memory)[i] == byte_of(operation.key, 1 - number, i),
                    "other bytes were received");
          }
        }
      } else if (each.result == Link::Result::kMisfit) {
        require(!operation.fits, "a message of the right length did not fit");
        misfits_[number].insert(operation.key);
      } else {
        require(each.result == Link::Result::kEpochOver, "a link has ended");
        // The notice of the other side comes later.
        ended_[number].insert(operation.key);
      }
      // Nobody uses it any more: other bytes, and soon nobody's memory.
      std::fill(operation.memory->begin(), operation.memory->end(), 0xEE);
      side.open.erase(found);
    }
    for (const auto& each : side.link->take_notices()) {
      if (each.kind == Kind::kEpoch) {
        uint32_t& epoch = side.epochs[each.key.channel];
        epoch = std::max(epoch, each.key.epoch);
        require(each.text == "because", "another reason");
      } else if (each.kind == Kind::kLeft) {
        require(each.key == Key{2, 0, 3, 4} && each.text == "enough", "another channel was left");
      } else if (each.kind == Kind::kMisfit) {
        require(each.own != each.other, "a message fitted");
        misfits_[number].insert(each.key);
      }
    }
    for (const auto& key : ended_[number]) {
      require(key.epoch < side.epochs[key.channel], "an epoch ended that nobody has ended");
    }
    ended_[number].clear();
  }

  void fail(int number) {
    Side& side = sides_[number];
    const uint64_t channel = pick(2);
    uint32_t& epoch = side.epochs[channel];
    side.link->begin_epoch(channel, ++epoch, "because");
    settle(number);
  }

  void connect(size_t rail) {
    if (is_connected_[rail] || !pipes_[0][rail].bytes.empty() || !pipes_[1][rail].bytes.empty()) {
      return;
    }
    for (int side = 0; side < 2; ++side) {
      pipes_[side][rail] = {};
      sides_[side].link->rail(rail).connected(now_);
    }
    is_connected_[rail] = true;
  }

  // Bytes that were under way may be lost; what is before them still arrives.
  void cut(size_t rail) {
    if (!is_connected_[rail]) {
      return;
    }
    is_connected_[rail] = false;
    for (int side = 0; side < 2; ++side) {
      Pipe& pipe = pipes_[side][rail];
      if (!pipe.bytes.empty()) {
        pipe.bytes.resize(pick(pipe.bytes.size() + 1));
      }
      pipe.has_ended = true;
      if (pipe.bytes.empty() || happens(30)) {
        pipe.bytes.clear();
        sides_[1 - side].link->rail(rail).broken();
      }
    }
  }

  void flip(int from, size_t rail) {
    Pipe& pipe = pipes_[from][rail];
    if (!pipe.bytes.empty()) {
      pipe.bytes[pick(pipe.bytes.size())] ^= static_cast<uint8_t>(1U << pick(8));
    }
  }

  void write(int number, size_t rail, size_t most) {
    Rail& from = sides_[number].link->rail(rail);
    if (!is_connected_[rail]) {
      return;
    }
    from.to_write(spans_, most, now_);
    size_t count = 0;
    for (const auto& each : spans_) {
      const size_t taken = std::min(each.size, most - count);
      auto& bytes = pipes_[number][rail].bytes;
      bytes.insert(bytes.end(), each.data, each.data + taken);
      count += taken;
    }
    from.did_write(count, now_);
    require(from.state() != Rail::State::kEnded, "a rail has ended");
  }

  void read(int number, size_t rail, size_t most) {
    Pipe& pipe = pipes_[1 - number][rail];
    Rail& to = sides_[number].link->rail(rail);
    while (most > 0 && !pipe.bytes.empty()) {
      const Space space = to.to_read();
      const size_t count = std::min({most, space.size, pipe.bytes.size()});
      require(count > 0 || to.state() == Rail::State::kBroken, "no room to read");
      if (count == 0) {
        pipe.bytes.clear();
        break;
      }
      std::copy(pipe.bytes.begin(), pipe.bytes.begin() + static_cast<std::ptrdiff_t>(count),
                space.data);
      pipe.bytes.erase(pipe.bytes.begin(), pipe.bytes.begin() + static_cast<std::ptrdiff_t>(count));
      most -= count;
      const bool is_right = to.did_read(count, now_);
      settle(number);
      if (!is_right) {
        require(to.state() != Rail::State::kEnded, "a rail has ended");
        to.broken();
        pipe.bytes.clear();
        cut(rail);
      }
    }
    if (pipe.has_ended && pipe.bytes.empty()) {
      to.broken();
    }
  }

  void check() {
    for (int side = 0; side < 2; ++side) {
      settle(side);
      require(sides_[side].link->kept_bytes() <= kCreditHere, "more is kept than the credit");
      sides_[side].link->tick(now_, 1000 * kSecond);
      require(sides_[side].link->ended() == Rail::End::kNone, "a link has ended");
    }
  }

  [[nodiscard]] bool is_done() {
    for (auto& side : sides_) {
      if (!side.open.empty() || !side.link->is_acknowledged()) {
        return false;
      }
    }
    for (auto& rails : pipes_) {
      for (auto& pipe : rails) {
        if (!pipe.bytes.empty()) {
          return false;
        }
      }
    }
    return true;
  }

  std::mt19937_64 random_;
  Side sides_[2];
  std::vector<Pipe> pipes_[2];  // by the side that writes
  std::vector<bool> is_connected_;
  std::map<Key, Pending> waiting_;
  std::set<Key> misfits_[2];  // keys of messages that a side knows not to fit
  std::set<Key> ended_[2];    // keys of operations whose epoch was over
  std::vector<Bytes> spans_;
  uint64_t id_ = 0;
  uint32_t slot_ = 0;
  Time now_ = 0;
};

// Frames that are right by themselves, in any order.
void hostile(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](uint64_t below) { return random() % below; };
  Link link(
      2, [](size_t) { return std::string("this"); },
      [](const std::string& text, size_t) { return text == "that" ? "" : "no"; }, kCreditHere);
  const auto length = [&]() { return pick(9) == 0 ? pick(500) : pick(2) == 0 ? kChunk + 5 : 302; };
  std::vector<std::unique_ptr<Memory>> memories;
  uint64_t id = 0;
  std::vector<Bytes> spans;
  uint64_t number[2] = {0, 0};
  std::set<Key> used[2];
  for (int i = 0; i < 300; ++i) {
    const size_t index = pick(2);
    Rail& rail = link.rail(index);
    const auto any_key = [&]() {
      return Key{pick(2), static_cast<uint32_t>(pick(3)), static_cast<uint32_t>(pick(60)), 0};
    };
    const Key own = any_key();
    if (pick(6) == 0 && used[0].insert(own).second) {
      memories.push_back(std::make_unique<Memory>(length()));
      link.receive(++id, own, memories.back()->data(), {memories.back()->size(), 7});
    }
    if (pick(8) == 0 && used[1].insert(own).second) {
      memories.push_back(std::make_unique<Memory>(length()));
      link.send(++id, own, memories.back()->data(), {memories.back()->size(), 7});
    }
    if (rail.state() == Rail::State::kBroken) {
      rail.connected(0);
    }
    rail.to_write(spans, 1 + pick(400000), 0);
    size_t count = 0;
    for (const auto& each : spans) {
      count += each.size;
    }
    rail.did_write(pick(4) == 0 ? pick(count + 1) : count, 0);
    Frame frame = text_frame(static_cast<Kind>(pick(99) == 0 ? 1 + pick(2) : 3 + pick(7)),
                             pick(10) > 0 ? "that" : "none");
    Memory payload;
    Header& header = frame.header;
    if (rail.state() == Rail::State::kGreeting && pick(60) > 0) {
      header.kind = Kind::kGreeting;
    } else if (rail.state() == Rail::State::kOpen && pick(3) > 0) {
      header.kind = Kind::kData;
    }
    header.key = any_key();
    header.shape.form = pick(60) == 0 ? 8 : 7;
    header.shape.total = header.key.slot % 6 == 0 ? kChunk + 5 : 300 + header.key.slot;
    header.offset = kChunk * pick(1 + header.shape.total / kChunk);
    if (pick(60) == 0) {
      (pick(2) == 0 ? header.shape.total : header.offset) =
          pick(2) == 0 ? random() : pick(3 * kChunk);
    }
    if (header.kind == Kind::kData) {
      const uint64_t rest = header.shape.total - std::min(header.shape.total, header.offset);
      payload.resize(pick(99) == 0 ? pick(1000) : std::min<uint64_t>(rest, kChunk));
      frame.payload = {payload.data(), payload.size(), nullptr};
    }
    const bool is_numbered = header.kind != Kind::kGreeting && header.kind != Kind::kRefusal &&
                             header.kind != Kind::kNothing;
    header.number = is_numbered ? (pick(99) == 0 ? random() : number[index] + 1) : 0;
    header.received = pick(99) == 0 ? random() : 0;
    header.length = static_cast<uint32_t>(frame.payload.size);
    header.checksum = crc32c(frame.payload.data, frame.payload.size);
    Memory bytes(kHeaderBytes);
    write_header(header, bytes.data());
    bytes.insert(bytes.end(), frame.payload.data, frame.payload.data + frame.payload.size);
    if (pick(60) == 0) {
      bytes[pick(bytes.size())] ^= 1;
    }
    size_t at = 0;
    bool is_right = true;
    while (at < bytes.size() && is_right) {
      const Space space = rail.to_read();
      const size_t size = std::min(space.size, bytes.size() - at);
      if (size == 0) {
        break;
      }
      std::memcpy(space.data, bytes.data() + at, size);
      at += size;
      is_right = rail.did_read(size, 0);
      require(link.kept_bytes() <= kCreditHere, "more is kept than the credit");
      if (pick(50) == 0) {
        link.begin_epoch(pick(2), static_cast<uint32_t>(pick(4)), "");
      }
    }
    if (at == bytes.size() && is_right && header.number == number[index] + 1) {
      ++number[index];
      ++frames_taken;
    }
    if (!is_right || pick(100) == 0) {
      rail.broken();
    }
    for (const auto& each : link.take_completions()) {
      require(each.id <= id, "an unknown operation completed");
    }
    (void)link.take_notices();
    link.tick(0, kSecond);
    if (link.ended() != Rail::End::kNone) {
      return;
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const uint64_t first = std::strtoull(count > 1 ? arguments[1] : "0", nullptr, 10);
  const uint64_t histories = std::strtoull(count > 2 ? arguments[2] : "100", nullptr, 10);
  const bool is_hostile = count > 3 && std::string(arguments[3]) == "hostile";
  for (uint64_t i = 0; i < histories; ++i) {
    seed_of_history = first + i;
    if (is_hostile) {
      hostile(seed_of_history);
    } else {
      History(seed_of_history).run();
    }
  }
  require(!is_hostile || frames_taken > 10 * histories, "too few frames were taken");
  std::printf("%llu histories\n", static_cast<unsigned long long>(histories));
  return 0;
}
