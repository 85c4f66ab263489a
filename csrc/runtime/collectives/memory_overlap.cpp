// The runtime needs these functions too, and does not link with the operators' library.
#include "ops/memory_overlap.cpp"  // NOLINT
