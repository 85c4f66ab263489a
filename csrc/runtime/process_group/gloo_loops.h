// The threads of a Gloo backend that wait for messages. They end only when no file is ready.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace commhook {

// A connection of a backend.
struct GlooSocket {
  int fd;
  uint64_t inode;  // distinguishes it from a later file with the same number
};

// The event loops of one backend: one for each network device.
//
// A loop that ends waits until no file is ready for 10 ms. A connection stays ready while it has a
// message that no receiver wants any more: Gloo leaves this message unread. The loop then never
// ends. This class makes each file edge-triggered, so that it is ready only when bytes come.
//
// On Linux. Elsewhere no loops are found.
class GlooLoops {
 public:
  // addresses: what the backend has written to its store. They contain the address of the socket on
  // which it listens; this identifies its loops.
  explicit GlooLoops(const std::vector<std::vector<uint8_t>>& addresses);
  GlooLoops(const GlooLoops&) = delete;
  GlooLoops& operator=(const GlooLoops&) = delete;
  ~GlooLoops();

  // The TCP connections in the loops.
  [[nodiscard]] std::vector<GlooSocket> sockets() const;

  // Makes all files edge-triggered; files that are ready are reported once more. A working loop
  // would lose events by this. It skips the event of a locked connection, and only another call
  // reports it again.
  // drops_output: also stops waiting until a connection can send.
  // Returns whether a loop still exists.
  [[nodiscard]] bool quieten(bool drops_output) const;

 private:
  struct Loop {
    int epoll;     // this object's own descriptor
    int listener;  // stays in the loop until its end
  };
  std::vector<Loop> loops_;
};

}  // namespace commhook
