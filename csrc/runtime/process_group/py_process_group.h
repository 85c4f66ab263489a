// torch_commhook.ProcessGroup: a process group with methods that a Python class defines.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "runtime/process_group/py_override.h"
#include "runtime/python/torch_release.h"

#if COMMHOOK_TORCH_AT_LEAST(2, 13)
#define COMMHOOK_SINCE_2_13 override
#else
#define COMMHOOK_SINCE_2_13
#endif

namespace commhook {

// Each virtual method calls the Python class's override, on any thread; all old and new names of a
// collective call the same one. Without an override, the group's registered backends run the
// method, or it is an error.
class PyProcessGroup : public c10d::ProcessGroup {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;

  using ProcessGroup::ProcessGroup;

  // The Python names of each virtual method, by its C++ name.
  static const std::map<std::string, const PyMethod*>& methods();

  // Whether the group has hooks. Python keeps them.
  bool hooked() const { return hooked_; }
  void set_hooked(bool hooked) { hooked_ = hooked; }

  int getRank() const override;
  int getSize() const override;
  const std::string getBackendName() const override;
  const std::string& getGroupName() const override;
  void setGroupName(const std::string& name) override;
  const std::string& getGroupDesc() const override;
  void setGroupDesc(const std::string& description) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void shutdown() override;
  void abort() override;

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work allgather(TensorLists& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override;
  Work allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                           const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override;
  Work gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  Work reduce_scatter(Tensors& outputs, TensorLists& inputs,
                      const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                     std::vector<int64_t>& input_splits,
                     const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  // The names since torch 2.13, which the old names call.
  Work all_gather_single(at::Tensor& output, at::Tensor& input,
                         const c10d::AllgatherOptions& options) COMMHOOK_SINCE_2_13;
  Work all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& options) COMMHOOK_SINCE_2_13;
  Work reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) COMMHOOK_SINCE_2_13;
  Work reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options)
      COMMHOOK_SINCE_2_13;
  Work all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                         std::vector<int64_t>& input_splits,
                         const c10d::AllToAllOptions& options) COMMHOOK_SINCE_2_13;
  Work send(Tensors& tensors, int destination, int tag) override;
  Work recv(Tensors& tensors, int source, int tag) override;
  Work recvAnysource(Tensors& tensors, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  uint64_t getSequenceNumberForGroup() override;
  void startCoalescing(c10::DeviceType device) override;
  Work endCoalescing(c10::DeviceType device) override;
  c10::intrusive_ptr<ProcessGroup> mergeRemoteGroup(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const MergeOptions& options,
                                                    const int& size) override;
  c10::intrusive_ptr<ProcessGroup> splitGroup(
      const std::vector<int>& ranks, const std::optional<std::chrono::milliseconds>& timeout,
      const std::optional<c10::intrusive_ptr<c10d::Backend::Options>>& options,
      const std::optional<std::string>& name, const std::optional<std::string>& description
#if COMMHOOK_TORCH_AT_LEAST(2, 13)
      ,
      const std::optional<std::vector<c10::Device>>& devices
#endif
      ) override;
#if COMMHOOK_TORCH_AT_LEAST(2, 14)
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  Work gather_single(at::Tensor& output, at::Tensor& input,
                     const c10d::GatherOptions& options) override;
  Work gather_into_tensor(at::Tensor& output, at::Tensor& input,
                          const c10d::GatherOptions& options) override;
  bool supportsReconfigure() const override;
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  Work reconfigure(const c10d::ReconfigureOptions& options) override;
  bool supportsWindow() const override;
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
  void registerPreHook(int64_t hook_id, c10d::PreHook hook) override;
  void unregisterPreHook(int64_t hook_id) override;
  void registerPostHook(int64_t hook_id, c10d::PostHook hook) override;
  void unregisterPostHook(int64_t hook_id) override;
  void registerAbortHook(int64_t hook_id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t hook_id) override;
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
  bool supportsAbortHooks() const override;
  bool supportsCompletionHooks() const override;
  void registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t hook_id) override;
#endif
#else
  void setSequenceNumberForGroup() override;
#endif

 private:
  // Calls a method by its C++ name: the Python override, or else `base`.
  template <typename Result, typename Base, typename... Arguments>
  Result call(const PyMethod& method, const Base& base, const Arguments&... arguments) const;
  // The same with the group's hooks around it, for `base` too.
  template <typename Result, typename Base, typename... Arguments>
  Result with_hooks(const PyMethod& method, const Base& base, const Arguments&... arguments) const;
  // The same for a method that needs backends if there is no override.
  template <typename Result, typename Base, typename... Arguments>
  Result collective(const PyMethod& method, const Base& base, const Arguments&... arguments) const;
  const std::string& kept(std::string text) const;
  const std::string& text(const PyMethod& method, const std::atomic<const std::string*>& own) const;

#if COMMHOOK_TORCH_AT_LEAST(2, 14)
  template <typename Hook>
  void register_hook(const PyMethod& method, int64_t hook_id, Hook hook);
#endif

  std::atomic<bool> hooked_ = false;
  mutable std::mutex mutex_;
  mutable std::set<std::string> texts_;             // strings to which callers hold references
  std::atomic<const std::string*> name_ = nullptr;  // into texts_
  std::atomic<const std::string*> description_ = nullptr;
};

}  // namespace commhook
