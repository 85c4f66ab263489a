#include "runtime/collectives/broadcast_checks.h"

#include <map>
#include <utility>
#include <vector>

#include "ops/autograd_checks.h"
#include "ops/memory_check.h"
#include "ops/memory_overlap.h"
#include "ops/type_names.h"

namespace commhook {
namespace {

constexpr const char* kArgument = "tensors";

void check_tensor(const at::Tensor& tensor, int64_t index) {
  TORCH_CHECK_TYPE(tensor.defined(), kBroadcastCoalesced, ": ", argument_name(kArgument, index),
                   " must be a tensor, got None");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, kBroadcastCoalesced, ": ",
                   argument_name(kArgument, index), " must be dense (torch.strided), got layout ",
                   layout_name(tensor.layout()));
  TORCH_CHECK_TYPE(!tensor.is_quantized(), kBroadcastCoalesced, ": ",
                   argument_name(kArgument, index), " must not be quantized, got dtype ",
                   dtype_name(tensor.scalar_type()), "; pass its int_repr()");
  TORCH_CHECK_VALUE(!tensor.is_meta() && !tensor._is_zerotensor(), kBroadcastCoalesced, ": ",
                    argument_name(kArgument, index), " must have memory, got one ",
                    tensor.is_meta() ? "on the meta device" : "of zeros without any");
  check_has_version(kBroadcastCoalesced, kArgument, index, tensor);
  check_memory(kBroadcastCoalesced, kArgument, index, tensor);
  TORCH_CHECK_VALUE(!overlaps_itself(tensor), kBroadcastCoalesced, ": ",
                    argument_name(kArgument, index),
                    " must reach each of its elements once, got sizes ", tensor.sizes(),
                    " with strides ", tensor.strides(), "; pass tensor.contiguous()");
}

}  // namespace

void check_broadcast_not_recorded(at::TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_not_recorded(kBroadcastCoalesced, kArgument, static_cast<int64_t>(i), tensors[i],
                       "pass tensor.detach(), or call it under torch.no_grad()");
  }
  check_no_forward_gradient(kBroadcastCoalesced, kArgument, tensors);
}

void check_broadcast_coalesced(at::TensorList tensors, int64_t buffer_size, int64_t rank,
                               int64_t size) {
  TORCH_CHECK_VALUE(buffer_size > 0, kBroadcastCoalesced,
                    ": buffer_size must be at least 1 byte, got ", buffer_size);
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, kBroadcastCoalesced, ": rank must be a rank below ",
                    size, ", got ", rank);
  check_broadcast_not_recorded(tensors);
  std::map<std::pair<c10::DeviceType, int>, std::vector<Extent>> extents;  // by device
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    check_tensor(tensors[i], index);
    const auto device = tensors[i].device();
    extents[{device.type(), device.index()}].push_back(extent_of(tensors[i], index));
  }
  for (auto& [device, of_device] : extents) {
    const auto pair = find_overlap(tensors, std::move(of_device));
    TORCH_CHECK_VALUE(!pair, kBroadcastCoalesced,
                      ": tensors must share no memory with each other, got tensors[", pair->first,
                      "] and tensors[", pair->second, "] that overlap");
  }
}

}  // namespace commhook
