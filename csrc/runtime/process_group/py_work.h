// Work that a Python class does.
//
// Work that follows a Work runs before anybody can see the Work complete (FollowedWork). Code that
// only observes runs in a callback of the Work's Future (process_group/work.py). Such a callback
// runs on a thread of the backend. If it dropped the last reference to the backend's group, the
// backend would wait for that thread, which is itself. So callbacks, and the group inside a
// wrapper, are dropped on the main thread (main_thread.*).
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "runtime/process_group/py_override.h"
#include "runtime/python/torch_release.h"

namespace commhook {

// torch_commhook.Work. A subclass defines wait(), get_future(), or both. The other methods follow
// from the Future if there is one, otherwise from whether wait() has returned.
class PyWork : public c10d::Work {
 public:
  PyWork(int rank, c10d::OpType op_type) : Work(rank, op_type) {}

  // The Python names of each virtual method, by its C++ name.
  static const std::map<std::string, const PyMethod*>& methods();

  // Records that wait() has returned; used without a Future.
  void mark_completed();

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override;
#if COMMHOOK_TORCH_AT_LEAST(2, 14)
  std::chrono::milliseconds getTimeout() const override;
#endif
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
  uint64_t getCompletionKey() const override;
#endif

 private:
  template <typename Result, typename Fallback, typename... Arguments>
  Result call(const PyMethod& method, const Fallback& fallback,
              const Arguments&... arguments) const;
  // The Future of the Python class, or null if it defines none.
  virtual c10::intrusive_ptr<c10::ivalue::Future> own_future() const;
};

// The error of a complete Future, or null. torch.futures.Future.set_exception stores an exception
// as a value.
std::exception_ptr error_of(const c10::ivalue::Future& future);

// A Work for a Future. Unlike c10d's, it fails if Python has set an exception.
c10::intrusive_ptr<c10d::Work> work_of(c10::intrusive_ptr<c10::ivalue::Future> future);

// The Work of a Python object. The object's class may be a Python class that derives from this
// library's Work or from torch.distributed.Work. Then the Work keeps the object as long as C++
// needs it, and calls all overrides of its class. Needs the GIL.
c10::intrusive_ptr<c10d::Work> held_work(c10::intrusive_ptr<c10d::Work> work,
                                         const pybind11::object& python);

}  // namespace commhook
