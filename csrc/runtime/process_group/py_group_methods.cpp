#include "runtime/process_group/py_group_methods.h"

#include "runtime/process_group/py_process_group.h"

namespace commhook {

using namespace group_methods;

const std::map<std::string, const PyMethod*>& PyProcessGroup::methods() {
  static const std::map<std::string, const PyMethod*> methods{
      {"getRank", &kRank},
      {"getSize", &kSize},
      {"getBackendName", &kBackendName},
      {"getGroupName", &kGroupName},
      {"setGroupName", &kSetGroupName},
      {"getGroupDesc", &kGroupDesc},
      {"setGroupDesc", &kSetGroupDesc},
      {"setTimeout", &kSetTimeout},
      {"shutdown", &kShutdown},
      {"abort", &kAbort},
      {"broadcast", &kBroadcast},
      {"allreduce", &kAllreduce},
      {"allreduce_coalesced", &kAllreduceCoalesced},
      {"reduce", &kReduce},
      {"allgather", &kAllgather},
      {"_allgather_base", &kAllGatherSingle},
      {"allgather_coalesced", &kAllgatherCoalesced},
      {"allgather_into_tensor_coalesced", &kAllGatherSingleCoalesced},
      {"gather", &kGather},
      {"scatter", &kScatter},
      {"reduce_scatter", &kReduceScatter},
      {"_reduce_scatter_base", &kReduceScatterSingle},
      {"reduce_scatter_tensor_coalesced", &kReduceScatterSingleCoalesced},
      {"alltoall_base", &kAllToAllSingle},
      {"alltoall", &kAlltoall},
      {"send", &kSend},
      {"recv", &kRecv},
      {"recvAnysource", &kRecvAnysource},
      {"barrier", &kBarrier},
      {"monitoredBarrier", &kMonitoredBarrier},
      {"getSequenceNumberForGroup", &kSequenceNumber},
      {"startCoalescing", &kStartCoalescing},
      {"endCoalescing", &kEndCoalescing},
      {"mergeRemoteGroup", &kMergeRemoteGroup},
      {"splitGroup", &kSplitGroup},
#if COMMHOOK_TORCH_AT_LEAST(2, 13)
      {"all_gather_single", &kAllGatherSingle},
      {"all_gather_single_coalesced", &kAllGatherSingleCoalesced},
      {"reduce_scatter_single", &kReduceScatterSingle},
      {"reduce_scatter_single_coalesced", &kReduceScatterSingleCoalesced},
      {"all_to_all_single", &kAllToAllSingle},
#endif
#if COMMHOOK_TORCH_AT_LEAST(2, 14)
      {"addEphemeralTimeout", &kAddEphemeralTimeout},
      {"gather_single", &kGatherSingle},
      {"gather_into_tensor", &kGatherSingle},
      {"supportsReconfigure", &kSupportsReconfigure},
      {"get_reconfigure_handle", &kGetReconfigureHandle},
      {"reconfigure", &kReconfigure},
      {"supportsWindow", &kSupportsWindow},
      {"new_window", &kNewWindow},
      {"registerPreHook", &kRegisterPreHook},
      {"unregisterPreHook", &kUnregisterPreHook},
      {"registerPostHook", &kRegisterPostHook},
      {"unregisterPostHook", &kUnregisterPostHook},
      {"registerAbortHook", &kRegisterAbortHook},
      {"unregisterAbortHook", &kUnregisterAbortHook},
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
      {"supportsAbortHooks", &kSupportsAbortHooks},
      {"supportsCompletionHooks", &kSupportsCompletionHooks},
      {"registerCompletionHook", &kRegisterCompletionHook},
      {"unregisterCompletionHook", &kUnregisterCompletionHook},
#endif
#else
      {"setSequenceNumberForGroup", &kSetSequenceNumber},
#endif
  };
  return methods;
}

}  // namespace commhook
