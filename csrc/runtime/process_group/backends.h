#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace commhook {

// The backends that a group had.
class TakenBackends {
 public:
  // Takes them off. The group stays, and can be given others.
  // addresses: of a backend of Gloo, what it has written to its store.
  // last: of a backend of Gloo, a Work that is complete, which keeps its connections; or null.
  TakenBackends(c10d::ProcessGroup& group, std::vector<std::vector<uint8_t>> addresses,
                c10::intrusive_ptr<c10d::Work> last);

  // Lets go of them. One that nobody else holds ends, and with it its connections and its threads,
  // none of which may call this. Without the GIL, which these may wait for.
  void close();

 private:
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends_;
  std::vector<std::vector<uint8_t>> addresses_;
  c10::intrusive_ptr<c10d::Work> last_;
};

}  // namespace commhook
