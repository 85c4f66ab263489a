#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace commhook {

// Whether a group is PyTorch's own, and is known to have a backend for a device that is compiled
// and exchanges messages. Such a backend writes what its rank receives, and nothing else. A backend
// of a Python class may differ, PyTorch's fake one writes nothing, and its wrapper may hold any of
// them.
bool has_compiled_backend(c10d::ProcessGroup& group, c10::DeviceType device);

// The former backends of a group.
class TakenBackends {
 public:
  // Removes a group's backends. The group stays, and can be given others.
  // addresses: what a Gloo backend has written to its store.
  // last: a complete Work of a Gloo backend, which keeps its connections; or null.
  TakenBackends(c10d::ProcessGroup& group, std::vector<std::vector<uint8_t>> addresses,
                c10::intrusive_ptr<c10d::Work> last);

  // Releases the backends. A backend without other owners ends with its connections and threads.
  // None of these threads may call this. Called without the GIL, since they may wait for it.
  void close();

 private:
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends_;
  std::vector<std::vector<uint8_t>> addresses_;
  c10::intrusive_ptr<c10d::Work> last_;
};

}  // namespace commhook
