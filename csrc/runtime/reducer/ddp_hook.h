// The communication hook that this library registers with DDP's C++ reducer. For each bucket it
// runs a C++ hook without the GIL, or calls Python. An error leaves the reducer usable: backward()
// raises the exception with its type and traceback, and the next backward works.
//
// A reducer takes one communication hook for life. So attach registers this hook, which calls the
// currently attached hook, or averages as DDP does if none is attached. For each full bucket:
//
// 1. The reducer copies the gradients into the bucket and calls our hook.
// 2. Our hook takes the GIL and runs the Python hook, or runs the C++ hook without it. It keeps an
//    error until the end of backward, for two reasons. An exception thrown into the reducer would
//    leave it unusable. A Future that fails would leave collectives in progress that write into the
//    next step. Later buckets of the same backward issue no collectives, because other ranks would
//    pair them with the wrong ones. The buckets in progress get 60 seconds to complete, or until
//    Ctrl-C. After that the hook abandons them. Then it tells the other ranks.
// 3. When backward ends, the reducer waits for each Future in order. The library has waited for its
//    own before, no longer than the group's timeout. An error comes out of backward() here, with
//    its type and traceback, once all collectives are done. The result is checked against its
//    bucket (elements, dtype, device, layout).
// 4. The result goes into the gradients, with a cast if a hook of the library averaged in another
//    dtype. This is one unflatten_into for the bucket, into the gradients or, with
//    gradient_as_bucket_view, into the buffer. With find_unused_parameters or a static graph the
//    reducer does this for each parameter, because only it knows which gradients must stay
//    unchanged.
// 5. After the last bucket all ranks agree that the step succeeded.
//
// Compiled autograd examines a graph's hooks before it runs the graph, and DDP's reducer refuses it
// at that point. Just before, it examines a pre-hook of ours on each parameter's node
// (csrc/runtime/autograd/capture_notice.h). This pre-hook lets our own reducer take over.
//
// For a rank that has run out of inputs (join), DDP calls the hook from Python and drops its
// result. There an error is raised at once, or by the Future. Such a rank has no gradients of the
// step, so it clips nothing and calls no post-accumulate hooks.
//
// register_comm_hook(group, hook) uses PyTorch's own PythonCommHook instead, in which a bucket does
// not know its group. With None the average is over the default group. A hook of the library then
// checks its result itself. When the Future completes, it casts the result back into the bucket,
// without the GIL. After an error the reducer is unusable, as with PyTorch's own hooks.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <vector>

#include "runtime/cpp_hooks/cpp_hook.h"
#include "runtime/hooks/hook_result.h"
#include "runtime/python/py_ref.h"

namespace commhook {

// Registers a DdpHook with a reducer, for its life: a reducer takes one hook. `road` is the
// listener. `as_views`: the reducer keeps gradients in its buckets.
void register_ddp_hook(c10d::Reducer& reducer, pybind11::object road, bool as_views,
                       double timeout_seconds, double drain_seconds);

// For each parameter of a reducer that looks for unused ones, whether this rank has used it since
// the last step: int32, on the CPU. Later in the step, whether any rank has used it.
at::Tensor locally_used(c10d::Reducer& reducer);

// Whether a reducer has not finished a first backward. Outside of backward passes this is true
// before the first one, and after a first one that failed.
bool first_backward_is_open(c10d::Reducer& reducer);

class DdpHook : public c10d::CommHookInterface {
 public:
  // `road` is a Python object with these methods:
  //   begin_step() -> None or (CppHook, group for CPU tensors, group for others):
  //     a backward begins. The CppHook, if any, runs on its buckets.
  //   run(bucket: torch.distributed.GradBucket, rebuilt: bool) -> (hook, returned, dtype, after):
  //     called for each bucket if there is no CppHook. Returns the hook's name for errors; the
  //     hook's return value (a Future or a tensor); the required dtype of the result; and a
  //     function that converts the result before it is written, or None. `rebuilt`: the bucket has
  //     other parameters than at the last call with its index.
  //   end_step(error: Exception | None, sent: list | None): called once for each backward, when all
  //     results have been written, or at once after a failure. With a C++ hook, `sent` has (numel,
  //     dtype, bytes sent or None) for each bucket. backward() raises its exceptions.
  //   choose_delivery() -> "reducer", "buffer" or "write": the way of results into the gradients:
  enum class Delivery {
    kReducer,  // the reducer copies it into each parameter's gradient
    kBuffer,   // this class copies it into the bucket's buffer; the gradients are views of that
    kWrite,    // this class writes the gradients, in one pass over memory for each bucket
  };
  // choose_delivery() is called once, with the first bucket, since DDP may learn until then that
  // its graph is static.
  //
  // `timeout_seconds`: the limit for a Future. `drain_seconds`: how long to wait for the buckets in
  // flight after a bucket has failed, so that their collectives do not write into the next step.
  DdpHook(c10d::Reducer& reducer, pybind11::object road, bool as_views, double timeout_seconds,
          double drain_seconds)
      : reducer_(reducer),
        road_(std::move(road)),
        as_views_(as_views),
        timeout_seconds_(timeout_seconds),
        drain_seconds_(drain_seconds) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;

 private:
  struct Running;

  // Runs the hook; returns null if that fails, with the reason in running.failure.
  c10::intrusive_ptr<c10::ivalue::Future> start(c10d::GradBucket& bucket, Running& running,
                                                bool first);
  c10::intrusive_ptr<c10::ivalue::Future> start_python(c10d::GradBucket& bucket, Running& running);
  c10::intrusive_ptr<c10::ivalue::Future> start_cpp(c10d::GradBucket& bucket, Running& running);
  void begin_step();
  void choose_delivery();
  void fail(const std::exception_ptr& failure, double drain_seconds, const Running* late = nullptr);
  void give_up() const;
  std::exception_ptr ended(const std::exception_ptr& failure);
  void await(Running& running);
  void end_shadow();
  void drain(double seconds, const Running* late) const;
  void check_views(const Running& running, int64_t index) const;
  bool begins_backward(int64_t index, const at::Tensor& parameter) const;

  // A bucket in the running backward. Shared with the callback of the hook's Future.
  struct Running {
    std::vector<at::Tensor> parameters;
    at::Tensor buffer;
    std::unique_ptr<PyRef> after;    // null if the result is written as it is
    std::optional<ResultSpec> spec;  // missing if the hook was not called
    std::optional<CppRun> run;       // only of a C++ hook
    // The reducer waits for this Future of (number, value).
    c10::intrusive_ptr<c10::ivalue::Future> future;
    int64_t number;
    bool in_backward;
    std::atomic<bool> settled{false};
    std::exception_ptr failure;

    // Completes the Future; later calls do nothing.
    void settle(std::exception_ptr error, c10::IValue value = {},
                std::vector<c10::ivalue::Future::WeakStorage> storages = {});

    // Extracts and checks the result in the value of the hook's Future.
    at::Tensor result(const c10::IValue& value) const;
  };
  at::Tensor deliver(const Running& running, const at::Tensor& result) const;

  c10d::Reducer& reducer_;  // owns this object
  PyRef road_;
  const bool as_views_;
  std::optional<Delivery> delivery_;
  double timeout_seconds_;
  double drain_seconds_;
  // By a number of this class: in the first step of a static graph the reducer gives every bucket
  // the index 0.
  std::map<int64_t, std::shared_ptr<Running>> running_;
  int64_t next_number_ = 0;
  size_t written_ = 0;  // the number of delivered results
  bool ended_ = false;  // end_step() has been called for this backward
  // The parameters that the listener last saw under an index.
  std::map<int64_t, std::vector<at::Tensor>> parameters_;
  // The C++ hook of this backward, and its groups.
  std::shared_ptr<const CppHook> cpp_hook_;
  ProcessGroupPtr cpu_group_;
  ProcessGroupPtr device_group_;
  std::map<int64_t, const void*> in_huge_pages_;  // the buffers in huge pages, by index
  // The buckets of this backward so far: the last index, and the parameters.
  int64_t last_index_ = -1;
  std::vector<const c10::TensorImpl*> begun_;
  // Set if a bucket of this backward has failed. Later buckets then issue no collectives, since the
  // other ranks would pair these with the wrong ones.
  std::exception_ptr failure_;
};

}  // namespace commhook
