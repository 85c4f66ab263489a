#include "runtime/process_group/py_process_group.h"

#include <pybind11/chrono.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <utility>

#include "runtime/process_group/group_hooks.h"
#include "runtime/process_group/override_method.h"
#include "runtime/python/hook_names.h"

namespace py = pybind11;

// What c10d calls a collective before and since torch 2.13, which keeps the old names as virtual
// methods that call the new ones.
#if COMMHOOK_TORCH_AT_LEAST(2, 13)
#define COMMHOOK_BASE(before, since) since
#else
#define COMMHOOK_BASE(before, since) before
#endif

namespace commhook {
namespace {

// By their names in Python, the newest first, then those of older bindings, then C++'s.
const PyMethod kRank{"rank", "getRank"};
const PyMethod kSize{"size", "getSize"};
const PyMethod kBackendName{"name", "_get_backend_name", "getBackendName"};
const PyMethod kGroupName{"group_name", "getGroupName"};
const PyMethod kSetGroupName{"_set_group_name", "setGroupName"};
const PyMethod kGroupDesc{"group_desc", "getGroupDesc"};
const PyMethod kSetGroupDesc{"_set_group_desc", "setGroupDesc"};
const PyMethod kSetTimeout{"set_timeout", "setTimeout"};
const PyMethod kShutdown{"shutdown"};
const PyMethod kAbort{"abort"};
const PyMethod kBroadcast{"broadcast"};
const PyMethod kAllreduce{"allreduce"};
const PyMethod kAllreduceCoalesced{"allreduce_coalesced"};
const PyMethod kReduce{"reduce"};
const PyMethod kAllgather{"allgather"};
const PyMethod kAllGatherSingle{"all_gather_single", "_allgather_base"};
const PyMethod kAllgatherCoalesced{"allgather_coalesced"};
const PyMethod kAllGatherSingleCoalesced{"all_gather_single_coalesced",
                                         "allgather_into_tensor_coalesced"};
const PyMethod kGather{"gather"};
const PyMethod kScatter{"scatter"};
const PyMethod kReduceScatter{"reduce_scatter"};
const PyMethod kReduceScatterSingle{"reduce_scatter_single", "_reduce_scatter_base"};
const PyMethod kReduceScatterSingleCoalesced{"reduce_scatter_single_coalesced",
                                             "reduce_scatter_tensor_coalesced"};
const PyMethod kAllToAllSingle{"all_to_all_single", "alltoall_base"};
const PyMethod kAlltoall{"alltoall"};
const PyMethod kSend{"send"};
const PyMethod kRecv{"recv"};
const PyMethod kRecvAnysource{"recv_anysource", "recvAnysource"};
const PyMethod kBarrier{"barrier"};
const PyMethod kMonitoredBarrier{"monitored_barrier", "monitoredBarrier"};
const PyMethod kSequenceNumber{"_get_sequence_number_for_group", "getSequenceNumberForGroup"};
const PyMethod kStartCoalescing{"start_coalescing", "_start_coalescing", "startCoalescing"};
const PyMethod kEndCoalescing{"end_coalescing", "_end_coalescing", "endCoalescing"};
const PyMethod kMergeRemoteGroup{"merge_remote_group", "mergeRemoteGroup"};
const PyMethod kSplitGroup{"split_group", "splitGroup"};
#if COMMHOOK_TORCH_AT_LEAST(2, 14)
const PyMethod kAddEphemeralTimeout{"add_ephemeral_timeout", "_add_ephemeral_timeout",
                                    "addEphemeralTimeout"};
const PyMethod kGatherSingle{"gather_single", "gather_into_tensor"};
const PyMethod kSupportsReconfigure{"supports_reconfigure", "supportsReconfigure"};
const PyMethod kGetReconfigureHandle{"get_reconfigure_handle"};
const PyMethod kReconfigure{"reconfigure"};
const PyMethod kSupportsWindow{"supports_window", "supportsWindow"};
const PyMethod kNewWindow{"new_window"};
const PyMethod kRegisterPreHook{"register_pre_hook", "registerPreHook"};
const PyMethod kUnregisterPreHook{"unregister_pre_hook", "unregisterPreHook"};
const PyMethod kRegisterPostHook{"register_post_hook", "registerPostHook"};
const PyMethod kUnregisterPostHook{"unregister_post_hook", "unregisterPostHook"};
const PyMethod kRegisterAbortHook{"register_abort_hook", "registerAbortHook"};
const PyMethod kUnregisterAbortHook{"unregister_abort_hook", "unregisterAbortHook"};
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
const PyMethod kSupportsAbortHooks{"supports_abort_hooks", "supportsAbortHooks"};
const PyMethod kSupportsCompletionHooks{"supports_completion_hooks", "supportsCompletionHooks"};
const PyMethod kRegisterCompletionHook{"register_completion_hook", "registerCompletionHook"};
const PyMethod kUnregisterCompletionHook{"unregister_completion_hook", "unregisterCompletionHook"};
#endif
#else
const PyMethod kSetSequenceNumber{"_set_sequence_number_for_group", "setSequenceNumberForGroup"};
#endif

// "Group.allreduce".
std::string name_in(const PyProcessGroup& group, const PyMethod& method) {
  py::gil_scoped_acquire gil;
  const auto self = python_object_of(group);
  return (self ? type_name(self) : "ProcessGroup") + "." + method.names().front();
}

}  // namespace

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

template <typename Result, typename Base, typename... Arguments>
Result PyProcessGroup::call(const PyMethod& method, const Base& base,
                            const Arguments&... arguments) const {
  return call_override<Result>(
      this, method, [this] { return python_object_of(*this); }, base, arguments...);
}

template <typename Result, typename Base, typename... Arguments>
Result PyProcessGroup::with_hooks(const PyMethod& method, const Base& base,
                                  const Arguments&... arguments) const {
  if (!hooked_ || detail::ActiveOverride::exists(this, method) || !interpreter_is_running()) {
    return call<Result>(method, base, arguments...);
  }
  py::gil_scoped_acquire gil;
  const auto self = python_object_of(*this);
  const auto found = self ? method.find(self) : PyMethod::Found{};
  if (found.name != nullptr && is_override_method(found.attribute)) {  // which has the hooks
    return call<Result>(method, base, arguments...);
  }
  try {
    const py::cpp_function function([&](const py::args&, const py::kwargs&) -> Result {
      py::gil_scoped_release no_gil;
      return call<Result>(method, base, arguments...);
    });
    return Returned<Result>::from(
        run_with_hooks(self, method, function, py::make_tuple(self, arguments...), {}),
        {self, method});
  } catch (py::error_already_set& error) {
    std::rethrow_exception(persistent(error));
  }
}

template <typename Result, typename Base, typename... Arguments>
Result PyProcessGroup::collective(const PyMethod& method, const Base& base,
                                  const Arguments&... arguments) const {
  return with_hooks<Result>(
      method,
      [&]() -> Result {
        TORCH_CHECK_NOT_IMPLEMENTED(!deviceTypeToBackendType_.empty(), name_in(*this, method),
                                    " is not implemented: define it, or give the group a backend");
        return base();
      },
      arguments...);
}

#if COMMHOOK_TORCH_AT_LEAST(2, 14)
template <typename Hook>
void PyProcessGroup::register_hook(const PyMethod& method, int64_t hook_id, Hook hook) {
  py::gil_scoped_acquire gil;
  call<void>(
      method,
      [&] { TORCH_CHECK_NOT_IMPLEMENTED(false, name_in(*this, method), " is not implemented"); },
      hook_id, python_hook(std::move(hook)));
}
#endif

const std::string& PyProcessGroup::kept(std::string text) const {
  const std::lock_guard lock(mutex_);
  return *texts_.insert(std::move(text)).first;
}

// c10d keeps a name in the backends, which there need not be.
const std::string& PyProcessGroup::text(const PyMethod& method,
                                        const std::atomic<const std::string*>& own) const {
  return kept(call<std::string>(method, [&]() -> std::string {
    const std::string* const known = own;
    TORCH_CHECK(known != nullptr || &own == &description_, name_in(*this, method),
                ": the group has no name yet; torch_commhook.process_group.register gives it one");
    return known == nullptr ? "" : *known;
  }));
}

// ---- the group ---------------------------------------------------------------------------------

int PyProcessGroup::getRank() const {
  return call<int>(kRank, [&] { return ProcessGroup::getRank(); });
}

int PyProcessGroup::getSize() const {
  return call<int>(kSize, [&] { return ProcessGroup::getSize(); });
}

const std::string PyProcessGroup::getBackendName() const {
  // By the names of its own backends c10d looks for these in the group.
  return call<std::string>(kBackendName, [&] {
    return deviceTypeToBackendType_.empty() ? "custom"
                                            : std::string(ProcessGroup::getBackendName());
  });
}

const std::string& PyProcessGroup::getGroupName() const { return text(kGroupName, name_); }

void PyProcessGroup::setGroupName(const std::string& name) {
  call<void>(
      kSetGroupName,
      [&] {
        name_ = &kept(name);
        ProcessGroup::setGroupName(name);
      },
      name);
}

const std::string& PyProcessGroup::getGroupDesc() const { return text(kGroupDesc, description_); }

void PyProcessGroup::setGroupDesc(const std::string& description) {
  call<void>(
      kSetGroupDesc,
      [&] {
        description_ = &kept(description);
        ProcessGroup::setGroupDesc(description);
      },
      description);
}

void PyProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  call<void>(kSetTimeout, [&] { ProcessGroup::setTimeout(timeout); }, timeout);
}

void PyProcessGroup::shutdown() {
  call<void>(kShutdown, [&] { ProcessGroup::shutdown(); });
}

void PyProcessGroup::abort() {
  with_hooks<void>(kAbort, [&] { ProcessGroup::abort(); });
}

uint64_t PyProcessGroup::getSequenceNumberForGroup() {
  return collective<uint64_t>(kSequenceNumber,
                              [&] { return ProcessGroup::getSequenceNumberForGroup(); });
}

void PyProcessGroup::startCoalescing(c10::DeviceType device) {
  collective<void>(
      kStartCoalescing, [&] { ProcessGroup::startCoalescing(device); }, c10::Device(device));
}

PyProcessGroup::Work PyProcessGroup::endCoalescing(c10::DeviceType device) {
  return collective<Work>(
      kEndCoalescing, [&] { return ProcessGroup::endCoalescing(device); }, c10::Device(device));
}

c10::intrusive_ptr<c10d::ProcessGroup> PyProcessGroup::mergeRemoteGroup(
    const c10::intrusive_ptr<c10d::Store>& store, const MergeOptions& options, const int& size) {
  return collective<c10::intrusive_ptr<ProcessGroup>>(
      kMergeRemoteGroup, [&] { return ProcessGroup::mergeRemoteGroup(store, options, size); },
      store, size, options.timeout, options.group_name, options.group_desc);
}

c10::intrusive_ptr<c10d::ProcessGroup> PyProcessGroup::splitGroup(
    const std::vector<int>& ranks, const std::optional<std::chrono::milliseconds>& timeout,
    const std::optional<c10::intrusive_ptr<c10d::Backend::Options>>& options,
    const std::optional<std::string>& name, const std::optional<std::string>& description
#if COMMHOOK_TORCH_AT_LEAST(2, 13)
    ,
    const std::optional<std::vector<c10::Device>>& devices
#endif
) {
#if !COMMHOOK_TORCH_AT_LEAST(2, 13)
  const std::optional<std::vector<c10::Device>> devices;
#endif
  return collective<c10::intrusive_ptr<ProcessGroup>>(
      kSplitGroup,
      [&] {
        return ProcessGroup::splitGroup(ranks, timeout, options, name, description
#if COMMHOOK_TORCH_AT_LEAST(2, 13)
                                        ,
                                        devices
#endif
        );
      },
      ranks, timeout, options, name, description, devices);
}

// ---- collectives -------------------------------------------------------------------------------

PyProcessGroup::Work PyProcessGroup::broadcast(Tensors& tensors,
                                               const c10d::BroadcastOptions& options) {
  return collective<Work>(
      kBroadcast, [&] { return ProcessGroup::broadcast(tensors, options); }, tensors, options);
}

PyProcessGroup::Work PyProcessGroup::allreduce(Tensors& tensors,
                                               const c10d::AllreduceOptions& options) {
  return collective<Work>(
      kAllreduce, [&] { return ProcessGroup::allreduce(tensors, options); }, tensors, options);
}

PyProcessGroup::Work PyProcessGroup::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return collective<Work>(
      kAllreduceCoalesced, [&] { return ProcessGroup::allreduce_coalesced(tensors, options); },
      tensors, options);
}

PyProcessGroup::Work PyProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return collective<Work>(
      kReduce, [&] { return ProcessGroup::reduce(tensors, options); }, tensors, options);
}

PyProcessGroup::Work PyProcessGroup::allgather(TensorLists& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& options) {
  return collective<Work>(
      kAllgather, [&] { return ProcessGroup::allgather(outputs, inputs, options); }, outputs,
      inputs, options);
}

PyProcessGroup::Work PyProcessGroup::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& options) {
  return collective<Work>(
      kAllgatherCoalesced,
      [&] { return ProcessGroup::allgather_coalesced(outputs, inputs, options); }, outputs, inputs,
      options);
}

PyProcessGroup::Work PyProcessGroup::gather(TensorLists& outputs, Tensors& inputs,
                                            const c10d::GatherOptions& options) {
  return collective<Work>(
      kGather, [&] { return ProcessGroup::gather(outputs, inputs, options); }, outputs, inputs,
      options);
}

PyProcessGroup::Work PyProcessGroup::scatter(Tensors& outputs, TensorLists& inputs,
                                             const c10d::ScatterOptions& options) {
  return collective<Work>(
      kScatter, [&] { return ProcessGroup::scatter(outputs, inputs, options); }, outputs, inputs,
      options);
}

PyProcessGroup::Work PyProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  return collective<Work>(
      kReduceScatter, [&] { return ProcessGroup::reduce_scatter(outputs, inputs, options); },
      outputs, inputs, options);
}

PyProcessGroup::Work PyProcessGroup::alltoall(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllToAllOptions& options) {
  return collective<Work>(
      kAlltoall, [&] { return ProcessGroup::alltoall(outputs, inputs, options); }, outputs, inputs,
      options);
}

PyProcessGroup::Work PyProcessGroup::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                       const c10d::AllgatherOptions& options) {
  return collective<Work>(
      kAllGatherSingle,
      [&] {
        return ProcessGroup::COMMHOOK_BASE(_allgather_base, all_gather_single)(output, input,
                                                                               options);
      },
      output, input, options);
}

PyProcessGroup::Work PyProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::AllgatherOptions& options) {
  return all_gather_single(output, input, options);
}

PyProcessGroup::Work PyProcessGroup::all_gather_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return collective<Work>(
      kAllGatherSingleCoalesced,
      [&] {
        return ProcessGroup::COMMHOOK_BASE(allgather_into_tensor_coalesced,
                                           all_gather_single_coalesced)(outputs, inputs, options);
      },
      outputs, inputs, options);
}

PyProcessGroup::Work PyProcessGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return all_gather_single_coalesced(outputs, inputs, options);
}

PyProcessGroup::Work PyProcessGroup::reduce_scatter_single(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return collective<Work>(
      kReduceScatterSingle,
      [&] {
        return ProcessGroup::COMMHOOK_BASE(_reduce_scatter_base, reduce_scatter_single)(
            output, input, options);
      },
      output, input, options);
}

PyProcessGroup::Work PyProcessGroup::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return reduce_scatter_single(output, input, options);
}

PyProcessGroup::Work PyProcessGroup::reduce_scatter_single_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return collective<Work>(
      kReduceScatterSingleCoalesced,
      [&] {
        return ProcessGroup::COMMHOOK_BASE(reduce_scatter_tensor_coalesced,
                                           reduce_scatter_single_coalesced)(outputs, inputs,
                                                                            options);
      },
      outputs, inputs, options);
}

PyProcessGroup::Work PyProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return reduce_scatter_single_coalesced(outputs, inputs, options);
}

PyProcessGroup::Work PyProcessGroup::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                       std::vector<int64_t>& output_splits,
                                                       std::vector<int64_t>& input_splits,
                                                       const c10d::AllToAllOptions& options) {
  return collective<Work>(
      kAllToAllSingle,
      [&] {
        return ProcessGroup::COMMHOOK_BASE(alltoall_base, all_to_all_single)(
            output, input, output_splits, input_splits, options);
      },
      output, input, output_splits, input_splits, options);
}

PyProcessGroup::Work PyProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                   std::vector<int64_t>& output_splits,
                                                   std::vector<int64_t>& input_splits,
                                                   const c10d::AllToAllOptions& options) {
  return all_to_all_single(output, input, output_splits, input_splits, options);
}

PyProcessGroup::Work PyProcessGroup::send(Tensors& tensors, int destination, int tag) {
  return collective<Work>(
      kSend, [&] { return ProcessGroup::send(tensors, destination, tag); }, tensors, destination,
      tag);
}

PyProcessGroup::Work PyProcessGroup::recv(Tensors& tensors, int source, int tag) {
  return collective<Work>(
      kRecv, [&] { return ProcessGroup::recv(tensors, source, tag); }, tensors, source, tag);
}

PyProcessGroup::Work PyProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  return collective<Work>(
      kRecvAnysource, [&] { return ProcessGroup::recvAnysource(tensors, tag); }, tensors, tag);
}

PyProcessGroup::Work PyProcessGroup::barrier(const c10d::BarrierOptions& options) {
  return collective<Work>(kBarrier, [&] { return ProcessGroup::barrier(options); }, options);
}

void PyProcessGroup::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  collective<void>(
      kMonitoredBarrier, [&] { ProcessGroup::monitoredBarrier(options, wait_all_ranks); },
      options.timeout, wait_all_ranks);
}

#if COMMHOOK_TORCH_AT_LEAST(2, 14)

void PyProcessGroup::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  call<void>(kAddEphemeralTimeout, [&] { ProcessGroup::addEphemeralTimeout(timeout); }, timeout);
}

PyProcessGroup::Work PyProcessGroup::gather_single(at::Tensor& output, at::Tensor& input,
                                                   const c10d::GatherOptions& options) {
  return collective<Work>(
      kGatherSingle, [&] { return ProcessGroup::gather_single(output, input, options); }, output,
      input, options);
}

PyProcessGroup::Work PyProcessGroup::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                        const c10d::GatherOptions& options) {
  return gather_single(output, input, options);
}

bool PyProcessGroup::supportsReconfigure() const {
  return call<bool>(kSupportsReconfigure, [&] {
    return !deviceTypeToBackendType_.empty() && ProcessGroup::supportsReconfigure();
  });
}

c10d::ReconfigureHandle PyProcessGroup::get_reconfigure_handle() const {
  return collective<c10d::ReconfigureHandle>(
      kGetReconfigureHandle, [&] { return ProcessGroup::get_reconfigure_handle(); });
}

PyProcessGroup::Work PyProcessGroup::reconfigure(const c10d::ReconfigureOptions& options) {
  return collective<Work>(
      kReconfigure, [&] { return ProcessGroup::reconfigure(options); }, options);
}

bool PyProcessGroup::supportsWindow() const {
  return call<bool>(kSupportsWindow, [&] {
    return !deviceTypeToBackendType_.empty() && ProcessGroup::supportsWindow();
  });
}

c10::intrusive_ptr<c10d::Window> PyProcessGroup::new_window(
    const std::optional<at::Tensor>& tensor) {
  return collective<c10::intrusive_ptr<c10d::Window>>(
      kNewWindow, [&] { return ProcessGroup::new_window(tensor); }, tensor);
}

// ---- hooks, which Python keeps
// -------------------------------------------------------------------

void PyProcessGroup::registerPreHook(int64_t hook_id, c10d::PreHook hook) {
  register_hook(kRegisterPreHook, hook_id, std::move(hook));
}

void PyProcessGroup::unregisterPreHook(int64_t hook_id) {
  call<void>(kUnregisterPreHook, [] {}, hook_id);
}

void PyProcessGroup::registerPostHook(int64_t hook_id, c10d::PostHook hook) {
  register_hook(kRegisterPostHook, hook_id, std::move(hook));
}

void PyProcessGroup::unregisterPostHook(int64_t hook_id) {
  call<void>(kUnregisterPostHook, [] {}, hook_id);
}

void PyProcessGroup::registerAbortHook(int64_t hook_id, c10d::AbortHook hook) {
  register_hook(kRegisterAbortHook, hook_id, std::move(hook));
}

void PyProcessGroup::unregisterAbortHook(int64_t hook_id) {
  call<void>(kUnregisterAbortHook, [] {}, hook_id);
}

#if COMMHOOK_TORCH_AT_LEAST(2, 15)

bool PyProcessGroup::supportsAbortHooks() const {
  return call<bool>(kSupportsAbortHooks, [] { return false; });
}

bool PyProcessGroup::supportsCompletionHooks() const {
  return call<bool>(kSupportsCompletionHooks, [] { return false; });
}

void PyProcessGroup::registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) {
  register_hook(kRegisterCompletionHook, hook_id, std::move(hook));
}

void PyProcessGroup::unregisterCompletionHook(int64_t hook_id) {
  call<void>(kUnregisterCompletionHook, [] {}, hook_id);
}

#endif

#else

void PyProcessGroup::setSequenceNumberForGroup() {
  collective<void>(kSetSequenceNumber, [&] { ProcessGroup::setSequenceNumberForGroup(); });
}

#endif

}  // namespace commhook
