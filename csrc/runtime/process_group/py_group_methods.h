// The methods of a process group that a Python class may override.
#pragma once

#include "commhook/version.h"
#include "runtime/process_group/py_override.h"

namespace commhook::group_methods {

// Each has its names in Python, the newest first, then those of older bindings, then the C++ names.
inline const PyMethod kRank{"rank", "getRank"};
inline const PyMethod kSize{"size", "getSize"};
inline const PyMethod kBackendName{"name", "_get_backend_name", "getBackendName"};
inline const PyMethod kGroupName{"group_name", "getGroupName"};
inline const PyMethod kSetGroupName{"_set_group_name", "setGroupName"};
inline const PyMethod kGroupDesc{"group_desc", "getGroupDesc"};
inline const PyMethod kSetGroupDesc{"_set_group_desc", "setGroupDesc"};
inline const PyMethod kSetTimeout{"set_timeout", "setTimeout"};
inline const PyMethod kShutdown{"shutdown"};
inline const PyMethod kAbort{"abort"};
inline const PyMethod kBroadcast{"broadcast"};
inline const PyMethod kAllreduce{"allreduce"};
inline const PyMethod kAllreduceCoalesced{"allreduce_coalesced"};
inline const PyMethod kReduce{"reduce"};
inline const PyMethod kAllgather{"allgather"};
inline const PyMethod kAllGatherSingle{"all_gather_single", "_allgather_base"};
inline const PyMethod kAllgatherCoalesced{"allgather_coalesced"};
inline const PyMethod kAllGatherSingleCoalesced{"all_gather_single_coalesced",
                                                "allgather_into_tensor_coalesced"};
inline const PyMethod kGather{"gather"};
inline const PyMethod kScatter{"scatter"};
inline const PyMethod kReduceScatter{"reduce_scatter"};
inline const PyMethod kReduceScatterSingle{"reduce_scatter_single", "_reduce_scatter_base"};
inline const PyMethod kReduceScatterSingleCoalesced{"reduce_scatter_single_coalesced",
                                                    "reduce_scatter_tensor_coalesced"};
inline const PyMethod kAllToAllSingle{"all_to_all_single", "alltoall_base"};
inline const PyMethod kAlltoall{"alltoall"};
inline const PyMethod kSend{"send"};
inline const PyMethod kRecv{"recv"};
inline const PyMethod kRecvAnysource{"recv_anysource", "recvAnysource"};
inline const PyMethod kBarrier{"barrier"};
inline const PyMethod kMonitoredBarrier{"monitored_barrier", "monitoredBarrier"};
inline const PyMethod kSequenceNumber{"_get_sequence_number_for_group",
                                      "getSequenceNumberForGroup"};
inline const PyMethod kStartCoalescing{"start_coalescing", "_start_coalescing", "startCoalescing"};
inline const PyMethod kEndCoalescing{"end_coalescing", "_end_coalescing", "endCoalescing"};
inline const PyMethod kMergeRemoteGroup{"merge_remote_group", "mergeRemoteGroup"};
inline const PyMethod kSplitGroup{"split_group", "splitGroup"};
#if COMMHOOK_TORCH_AT_LEAST(2, 14)
inline const PyMethod kAddEphemeralTimeout{"add_ephemeral_timeout", "_add_ephemeral_timeout",
                                           "addEphemeralTimeout"};
inline const PyMethod kGatherSingle{"gather_single", "gather_into_tensor"};
inline const PyMethod kSupportsReconfigure{"supports_reconfigure", "supportsReconfigure"};
inline const PyMethod kGetReconfigureHandle{"get_reconfigure_handle"};
inline const PyMethod kReconfigure{"reconfigure"};
inline const PyMethod kSupportsWindow{"supports_window", "supportsWindow"};
inline const PyMethod kNewWindow{"new_window"};
inline const PyMethod kRegisterPreHook{"register_pre_hook", "registerPreHook"};
inline const PyMethod kUnregisterPreHook{"unregister_pre_hook", "unregisterPreHook"};
inline const PyMethod kRegisterPostHook{"register_post_hook", "registerPostHook"};
inline const PyMethod kUnregisterPostHook{"unregister_post_hook", "unregisterPostHook"};
inline const PyMethod kRegisterAbortHook{"register_abort_hook", "registerAbortHook"};
inline const PyMethod kUnregisterAbortHook{"unregister_abort_hook", "unregisterAbortHook"};
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
inline const PyMethod kSupportsAbortHooks{"supports_abort_hooks", "supportsAbortHooks"};
inline const PyMethod kSupportsCompletionHooks{"supports_completion_hooks",
                                               "supportsCompletionHooks"};
inline const PyMethod kRegisterCompletionHook{"register_completion_hook", "registerCompletionHook"};
inline const PyMethod kUnregisterCompletionHook{"unregister_completion_hook",
                                                "unregisterCompletionHook"};
#endif
#else
inline const PyMethod kSetSequenceNumber{"_set_sequence_number_for_group",
                                         "setSequenceNumberForGroup"};
#endif

}  // namespace commhook::group_methods
