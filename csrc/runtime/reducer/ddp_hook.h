// The communication hook that this library registers with DDP's C++ reducer. For each bucket it
// runs a hook in C++, without the GIL, or calls Python, and keeps the reducer usable whatever that
// does: an exception reaches the caller of backward() with its type and traceback, and the next
// backward works.
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

// Registers a DdpHook with a reducer, for life: a reducer takes one hook. `road` is the listener.
// `as_views`: the reducer keeps gradients in its buckets.
void register_ddp_hook(c10d::Reducer& reducer, pybind11::object road, bool as_views,
                       double timeout_seconds, double drain_seconds);

// For each parameter of a reducer that looks for unused ones, whether this rank has used it since
// the last step: int32, on the CPU. Later in the step it holds what all ranks have used.
at::Tensor locally_used(c10d::Reducer& reducer);

// Whether a reducer has not come to the end of a first backward. Outside of backward passes that
// is so before the first one, and after one that an exception has ended.
bool first_backward_is_open(c10d::Reducer& reducer);

class DdpHook : public c10d::CommHookInterface {
 public:
  // `road` is a Python object with
  //   begin_step() -> None or (CppHook, group for CPU tensors, group for others): a backward
  //   begins.
  //     With a hook, that runs on its buckets.
  //   run(bucket: torch.distributed.GradBucket, rebuilt: bool) -> (hook, returned, dtype, after):
  //     without one, called for each: the name of the hook for errors, what it returned (a Future
  //     or a tensor), the dtype that the result must have, and a function that makes of the result
  //     what is to be written, or None. `rebuilt` says that the bucket holds other parameters than
  //     it held when this last saw its index.
  //   end_step(error: Exception | None, sent: list | None): called once for each backward: when all
  //     results have been written, or at once where something failed. `sent` has (numel, dtype,
  //     bytes on the wire or None) of each bucket, where a C++ hook ran. What it raises comes out
  //     of backward().
  //   choose_delivery() -> "reducer", "buffer" or "write": who brings results into the gradients:
  enum class Delivery {
    kReducer,  // the reducer, with a copy for each parameter
    kBuffer,   // this: into the bucket's buffer, of which the gradients are views
    kWrite,    // this: into the gradients, with one pass over memory for each bucket
  };
  // It is asked once, when the first bucket comes, since DDP can be told that its graph is static
  // until then.
  //
  // `timeout_seconds` is how long a Future may take, `drain_seconds` how long a bucket that failed
  // waits for those in flight: what their collectives write must not come into the next step.
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

  // Runs the hook; null where it failed, with the reason in running.failure.
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

  // A bucket of the running backward. Shared with the callback of the hook's Future.
  struct Running {
    std::vector<at::Tensor> parameters;
    at::Tensor buffer;
    std::unique_ptr<PyRef> after;    // null where the result is written as it is
    std::optional<ResultSpec> spec;  // missing where the hook did not come to give a result
    std::optional<CppRun> run;       // of a C++ hook
    // What the reducer waits for, a Future of (number, value).
    c10::intrusive_ptr<c10::ivalue::Future> future;
    int64_t number;
    bool in_backward;
    std::atomic<bool> settled{false};
    std::exception_ptr failure;

    // Completes the Future, the first time that this is called.
    void settle(std::exception_ptr error, c10::IValue value = {},
                std::vector<c10::ivalue::Future::WeakStorage> storages = {});

    // The checked result in the value of the hook's Future.
    at::Tensor result(const c10::IValue& value) const;
  };
  at::Tensor deliver(const Running& running, const at::Tensor& result) const;

  c10d::Reducer& reducer_;  // which owns this
  PyRef road_;
  const bool as_views_;
  std::optional<Delivery> delivery_;
  double timeout_seconds_;
  double drain_seconds_;
  // By a number of our own: in the first step of a static graph the reducer gives every bucket the
  // index 0.
  std::map<int64_t, std::shared_ptr<Running>> running_;
  int64_t next_number_ = 0;
  size_t written_ = 0;  // how many of them
  bool ended_ = false;  // end_step() has been called for this backward
  // What the road last saw under an index.
  std::map<int64_t, std::vector<at::Tensor>> parameters_;
  // The C++ hook of this backward, and its groups.
  std::shared_ptr<const CppHook> cpp_hook_;
  ProcessGroupPtr cpu_group_;
  ProcessGroupPtr device_group_;
  std::map<int64_t, const void*> in_huge_pages_;  // by index: the buffers that have been put there
  // The buckets of this backward so far: the last index, and their parameters.
  int64_t last_index_ = -1;
  std::vector<const c10::TensorImpl*> begun_;
  // Set where a bucket of this backward failed; later buckets then issue no collectives, which
  // the other ranks would pair with the wrong ones.
  std::exception_ptr failure_;
};

}  // namespace commhook
