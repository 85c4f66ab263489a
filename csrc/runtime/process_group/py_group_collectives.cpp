// The collectives of a group; a Python class may override them.
#include "runtime/process_group/py_group_call.h"
#include "runtime/process_group/py_group_methods.h"

// c10d's names of a collective before and since torch 2.13. The old names remain as virtual methods
// that call the new ones.
#if COMMHOOK_TORCH_AT_LEAST(2, 13)
#define COMMHOOK_BASE(before, since) since
#else
#define COMMHOOK_BASE(before, since) before
#endif

namespace commhook {

using namespace group_methods;

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

#endif

}  // namespace commhook
