// Calls counts_before() of topk with given states of earlier parts. Blocks on the host run one
// after the other, so that no kernel there meets a part that knows only its own counts.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "on_host.h"
#include "topk_passes.cuh"

namespace on_host {
namespace {

using commhook::cuda::Known;
using commhook::cuda::RankCounts;

// known, above, equal: for each part before the last one, which has the counts 1 and 2. Returns the
// counts before the last part, and those in its state.
std::vector<int64_t> look_back(const std::vector<int64_t>& known, const std::vector<int64_t>& above,
                               const std::vector<int64_t>& equal) {
  std::vector<uint64_t> states;
  for (size_t i = 0; i < known.size(); ++i) {
    states.push_back(part_state(static_cast<Known>(known[i]),
                                {static_cast<int32_t>(above[i]), static_cast<int32_t>(equal[i])}));
  }
  states.push_back(0);
  RankCounts before{};
  launch("look_back", 1, kLanes, 0, 0, [&] {
    const auto counts = commhook::cuda::counts_before(
        states.data(), static_cast<int64_t>(known.size()), RankCounts{1, 2});
    if (threadIdx.x == 0) {
      before = counts;
    }
  });
  const auto own = commhook::cuda::counts_in(states.back());
  return {before.above, before.equal, static_cast<int64_t>(commhook::cuda::known_of(states.back())),
          own.above, own.equal};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(commhook_on_host, m) {
  m.def("look_back(int[] known, int[] above, int[] equal) -> int[]",
        [](std::vector<int64_t> known, std::vector<int64_t> above, std::vector<int64_t> equal) {
          return look_back(known, above, equal);
        });
}

}  // namespace on_host
