#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace commhook {

// The backends that a group had.
class TakenBackends {
 public:
  // Takes them off. The group stays, and can be given others.
  explicit TakenBackends(c10d::ProcessGroup& group);

  // Lets go of them. One that nobody else holds ends, and with it its connections and its threads,
  // none of which may call this. Without the GIL, which these may wait for.
  void close();

 private:
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends_;
};

}  // namespace commhook
