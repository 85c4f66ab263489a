// The threads that wait for messages of a Gloo backend, which end only when nothing is ready.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace commhook {

// A connection of a backend.
struct GlooSocket {
  int fd;
  uint64_t inode;  // tells it from a later file of the same number
};

// The event loops of one backend: one for each network device.
//
// A loop that ends waits until no file is ready for 10 ms. A connection stays ready if it has a
// message whose receiver has given up: Gloo leaves this message unread. The loop then never ends.
// Here each file is made edge-triggered, so that it is ready only when bytes come.
//
// On Linux. Elsewhere no loops are found.
class GlooLoops {
 public:
  // addresses: what the backend has written to its store. They contain the address of the socket
  // that it listens on, by which its loops are found.
  explicit GlooLoops(const std::vector<std::vector<uint8_t>>& addresses);
  GlooLoops(const GlooLoops&) = delete;
  GlooLoops& operator=(const GlooLoops&) = delete;
  ~GlooLoops();

  // The TCP connections that the loops wait for.
  [[nodiscard]] std::vector<GlooSocket> sockets() const;

  // Makes all files edge-triggered; those that are ready are told once more. A loop at work would
  // lose events by that: a connection that is locked skips an event, which comes again only here.
  // drops_output: also waits no more until something can be sent.
  // Returns whether a loop is still there.
  [[nodiscard]] bool quieten(bool drops_output) const;

 private:
  struct Loop {
    int epoll;     // a descriptor of our own
    int listener;  // in the loop until its end
  };
  std::vector<Loop> loops_;
};

}  // namespace commhook
