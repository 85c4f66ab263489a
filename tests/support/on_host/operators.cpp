// The host's interface for tests, as operators.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "host_side.h"
#include "places.h"

namespace on_host {
namespace {

// For each instruction of a kernel that has accessed memory: the kernel, the place, and a row of
// kind, requests, parts, the fewest parts, bytes.
std::tuple<std::vector<std::string>, std::vector<std::string>, at::Tensor> requests_told() {
  constexpr int64_t kColumns = 5;
  const auto costs = take_requests();
  std::vector<std::string> kernels;
  std::vector<const void*> instructions;
  auto rows = at::empty({static_cast<int64_t>(costs.size()), kColumns}, at::kLong);
  auto* row = rows.mutable_data_ptr<int64_t>();
  for (const auto& cost : costs) {
    kernels.push_back(cost.kernel);
    instructions.push_back(cost.instruction);
    for (const int64_t value :
         {static_cast<int64_t>(cost.kind), cost.requests, cost.parts, cost.fewest, cost.bytes}) {
      *row++ = value;
    }
  }
  return {kernels, lines_of(instructions), rows};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(commhook_on_host, m) {
  m.def("take_launched() -> str[]", take_launched);
  m.def("set_warps(int warps) -> ()", set_warps);
  m.def("omit_barrier(str name) -> ()", [](const std::string& name) { omit_barrier(name); });
  m.def("take_barriers() -> str[]", take_barriers);
  m.def("watch_requests(bool is_watched) -> ()", watch_requests);
  m.def("take_requests() -> (str[], str[], Tensor)", requests_told);
}

}  // namespace on_host
