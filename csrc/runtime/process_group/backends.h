#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace commhook {

// Lets go of a group's backends. One that nobody else holds ends, and with it its connections. The
// group stays, and can be given others.
void drop_backends(c10d::ProcessGroup& group);

}  // namespace commhook
