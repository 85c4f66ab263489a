#include "runtime/process_group/py_work.h"

#include <pybind11/chrono.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <functional>
#include <utility>

#include "commhook/hook_result.h"
#include "runtime/python/hook_names.h"
#include "runtime/python/waiting.h"

namespace py = pybind11;
using c10::ivalue::Future;

namespace commhook {
namespace {

const PyMethod kIsCompleted{"is_completed", "isCompleted"};
const PyMethod kIsSuccess{"is_success", "isSuccess"};
const PyMethod kException{"exception"};
const PyMethod kSourceRank{"source_rank", "_source_rank", "sourceRank"};
const PyMethod kResult{"result"};
const PyMethod kSynchronize{"synchronize"};
const PyMethod kWait{"wait"};
const PyMethod kBlockCurrentStream{"block_current_stream", "blockCurrentStream"};
const PyMethod kAbortWork{"abort"};
const PyMethod kGetFuture{"get_future", "getFuture"};
const PyMethod kGetFutureResult{"get_future_result", "getFutureResult"};
const PyMethod kGetDuration{"get_duration", "_get_duration", "getDuration"};
const PyMethod kGetSequenceNumber{"get_sequence_number", "getSequencenumber"};
const PyMethod kGetTimeout{"get_timeout", "getTimeout"};
const PyMethod kGetCompletionKey{"get_completion_key", "getCompletionKey"};

// The tensors in a Future's value: a tensor, or a list or tuple of tensors; set in C++ or in
// Python.
std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  if (!value.isPyObject()) {
    return value.isTensor() ? std::vector{value.toTensor()} : value.toTensorVector();
  }
  py::gil_scoped_acquire gil;
  const auto object = torch::jit::toPyObject(value);
  if (THPVariable_Check(object.ptr())) {
    return {THPVariable_Unpack(object.ptr())};
  }
  try {
    return object.cast<std::vector<at::Tensor>>();
  } catch (const py::cast_error&) {
    TORCH_CHECK_TYPE(false, "Work.result: the Future of get_future must hold tensors, got ",
                     type_name(object));
  }
}

// The C++ form of a Python Future's value, with tensors as tensors. Throws the Future's error.
c10::IValue native_value(Future& done) {
  if (const auto error = error_of(done)) {
    std::rethrow_exception(error);
  }
  const auto value = done.constValue();
  if (!value.isPyObject()) {
    return value;
  }
  py::gil_scoped_acquire gil;
  const auto object = torch::jit::toPyObject(value);
  if (THPVariable_Check(object.ptr())) {
    return THPVariable_Unpack(object.ptr());
  }
  if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr())) {
    return value;
  }
  std::vector<at::Tensor> tensors;
  for (const auto& element : py::reinterpret_borrow<py::sequence>(object)) {
    if (!THPVariable_Check(element.ptr())) {
      return value;
    }
    tensors.push_back(THPVariable_Unpack(element.ptr()));
  }
  return tensors;
}

// The Future of a Work for C++, which accepts neither Python objects as tensors nor values as
// errors.
c10::intrusive_ptr<Future> native_future(c10::intrusive_ptr<Future> future) {
  if (!future || !future->elementType()->isSubtypeOf(*c10::PyObjectType::get())) {
    return future;
  }
  return future->then(native_value, c10::AnyType::get());
}

// The Work of a Python object; keeps the object. Calls every override in Python, also those that
// the object's C++ class does not know of, as torch.distributed.Work's.
class HeldWork : public c10d::Work {
 public:
  HeldWork(c10::intrusive_ptr<Work> work, py::object python)
      : Work(-1, work->retrieveOpType()), work_(std::move(work)), python_(std::move(python)) {}

  bool isCompleted() override {
    return call<bool>(kIsCompleted, [&] { return work_->isCompleted(); });
  }
  bool isSuccess() const override {
    return call<bool>(kIsSuccess, [&] { return work_->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    return call<std::exception_ptr>(kException, [&] { return work_->exception(); });
  }
  int sourceRank() const override {
    return call<int>(kSourceRank, [&] { return work_->sourceRank(); });
  }
  std::vector<at::Tensor> result() override {
    return call<std::vector<at::Tensor>>(kResult, [&] { return work_->result(); });
  }
  void synchronize() override {
    call<void>(kSynchronize, [&] { work_->synchronize(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return call<bool>(kWait, [&] { return work_->wait(timeout); }, timeout);
  }
  void blockCurrentStream() override {
    call<void>(kBlockCurrentStream, [&] { work_->blockCurrentStream(); });
  }
  void abort() override {
    call<void>(kAbortWork, [&] { work_->abort(); });
  }
  c10::intrusive_ptr<Future> getFuture() override {
    return native_future(
        call<c10::intrusive_ptr<Future>>(kGetFuture, [&] { return work_->getFuture(); }));
  }
  c10::intrusive_ptr<Future> getFutureResult() override {
    return call<c10::intrusive_ptr<Future>>(kGetFutureResult,
                                            [&] { return work_->getFutureResult(); });
  }
  float getDuration() const override {
    return call<float>(kGetDuration, [&] { return work_->getDuration(); });
  }
  uint64_t getSequencenumber() const override {
    return call<uint64_t>(kGetSequenceNumber, [&] { return work_->getSequencenumber(); });
  }
#if COMMHOOK_TORCH_AT_LEAST(2, 14)
  std::chrono::milliseconds getTimeout() const override {
    return call<std::chrono::milliseconds>(kGetTimeout, [&] { return work_->getTimeout(); });
  }
#endif
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
  uint64_t getCompletionKey() const override {
    return call<uint64_t>(kGetCompletionKey, [&] { return work_->getCompletionKey(); });
  }
#endif

 private:
  template <typename Result, typename Fallback, typename... Arguments>
  Result call(const PyMethod& method, const Fallback& fallback,
              const Arguments&... arguments) const {
    return call_override<Result>(
        work_.get(), method, [this] { return python_.get(); }, fallback, arguments...);
  }

  const c10::intrusive_ptr<Work> work_;
  const PyRef python_;
};

constexpr double kForever = 1e9;  // seconds

// The class of a Work in Python, for errors.
std::string class_name(const PyWork& work) {
  py::gil_scoped_acquire gil;
  const auto self = python_object_of(work);
  return self ? type_name(self) : "Work";
}

class FutureWork : public PyWork {
 public:
  explicit FutureWork(c10::intrusive_ptr<Future> future)
      : PyWork(-1, c10d::OpType::UNKNOWN), future_(std::move(future)) {}

  c10::intrusive_ptr<Future> getFuture() override { return native_future(future_); }

 private:
  c10::intrusive_ptr<Future> own_future() const override { return future_; }

  const c10::intrusive_ptr<Future> future_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> work_of(c10::intrusive_ptr<Future> future) {
  return c10::make_intrusive<FutureWork>(std::move(future));
}

std::exception_ptr error_of(const Future& future) {
  if (future.hasError()) {
    return future.exception_ptr();
  }
  const auto value = future.constValue();
  if (!value.isPyObject()) {
    return nullptr;
  }
  py::gil_scoped_acquire gil;
  const auto object = torch::jit::toPyObject(value);
  if (!PyExceptionInstance_Check(object.ptr())) {
    return nullptr;
  }
  return persistent_exception(object);
}

const std::map<std::string, const PyMethod*>& PyWork::methods() {
  static const std::map<std::string, const PyMethod*> methods{
      {"isCompleted", &kIsCompleted},
      {"isSuccess", &kIsSuccess},
      {"exception", &kException},
      {"sourceRank", &kSourceRank},
      {"result", &kResult},
      {"synchronize", &kSynchronize},
      {"wait", &kWait},
      {"blockCurrentStream", &kBlockCurrentStream},
      {"abort", &kAbortWork},
      {"getFuture", &kGetFuture},
      {"getFutureResult", &kGetFutureResult},
      {"getDuration", &kGetDuration},
      {"getSequencenumber", &kGetSequenceNumber},
#if COMMHOOK_TORCH_AT_LEAST(2, 14)
      {"getTimeout", &kGetTimeout},
#endif
#if COMMHOOK_TORCH_AT_LEAST(2, 15)
      {"getCompletionKey", &kGetCompletionKey},
#endif
  };
  return methods;
}

template <typename Result, typename Fallback, typename... Arguments>
Result PyWork::call(const PyMethod& method, const Fallback& fallback,
                    const Arguments&... arguments) const {
  return call_override<Result>(
      this, method, [this] { return python_object_of(*this); }, fallback, arguments...);
}

c10::intrusive_ptr<Future> PyWork::own_future() const {
  return call<c10::intrusive_ptr<Future>>(kGetFuture, [] { return c10::intrusive_ptr<Future>(); });
}

bool PyWork::isCompleted() {
  return call<bool>(kIsCompleted, [&] {
    const auto future = own_future();
    return future ? future->completed() : Work::isCompleted();
  });
}

bool PyWork::isSuccess() const {
  return call<bool>(kIsSuccess, [&] {
    const auto future = own_future();
    return future ? future->completed() && !error_of(*future) : Work::isSuccess();
  });
}

std::exception_ptr PyWork::exception() const {
  return call<std::exception_ptr>(kException, [&] {
    const auto future = own_future();
    if (!future) {
      return Work::exception();
    }
    return future->completed() ? error_of(*future) : nullptr;
  });
}

int PyWork::sourceRank() const {
  return call<int>(kSourceRank, [&] { return Work::sourceRank(); });
}

std::vector<at::Tensor> PyWork::result() {
  return call<std::vector<at::Tensor>>(kResult, [&] {
    const auto future = own_future();
    TORCH_CHECK_NOT_IMPLEMENTED(
        future, class_name(*this),
        ".result is not implemented: define result(self), or get_future(self)");
    TORCH_CHECK(future->completed(), class_name(*this), ".result: the work has not completed");
    return tensors_in(future->value());
  });
}

void PyWork::synchronize() {
  call<void>(kSynchronize, [&] {
    if (const auto future = own_future()) {
      future->wait();
    }
  });
}

bool PyWork::wait(std::chrono::milliseconds timeout) {
  return call<bool>(
      kWait,
      [&] {
        const auto future = own_future();
        TORCH_CHECK_NOT_IMPLEMENTED(
            future, class_name(*this),
            ".wait is not implemented: define wait(self, timeout), or get_future(self)");
        if (timeout != kNoTimeout) {
          wait_for_result(*future, "Work.wait", std::chrono::duration<double>(timeout).count());
        } else {
          wait_for(*future, kForever);  // Ctrl-C ends it
        }
        future->wait();
        if (const auto error = error_of(*future)) {
          std::rethrow_exception(error);
        }
        return true;
      },
      timeout);
}

void PyWork::mark_completed() {
  if (!Work::isCompleted()) {
    finish();
  }
}

void PyWork::blockCurrentStream() {
  call<void>(kBlockCurrentStream, [&] { synchronize(); });
}

void PyWork::abort() {
  call<void>(kAbortWork, [&] {
    TORCH_CHECK_NOT_IMPLEMENTED(false, class_name(*this),
                                ".abort is not implemented: define abort(self)");
  });
}

c10::intrusive_ptr<Future> PyWork::getFuture() {
  return call<c10::intrusive_ptr<Future>>(kGetFuture, [&]() -> c10::intrusive_ptr<Future> {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, class_name(*this),
        ".get_future is not implemented: define get_future(self), which DDP calls");
  });
}

c10::intrusive_ptr<Future> PyWork::getFutureResult() {
  return call<c10::intrusive_ptr<Future>>(kGetFutureResult,
                                          [&] { return Work::getFutureResult(); });
}

float PyWork::getDuration() const {
  return call<float>(kGetDuration, [&] { return Work::getDuration(); });
}

uint64_t PyWork::getSequencenumber() const {
  return call<uint64_t>(kGetSequenceNumber, [&] { return Work::getSequencenumber(); });
}

#if COMMHOOK_TORCH_AT_LEAST(2, 14)
std::chrono::milliseconds PyWork::getTimeout() const {
  return call<std::chrono::milliseconds>(kGetTimeout, [&] { return Work::getTimeout(); });
}
#endif

#if COMMHOOK_TORCH_AT_LEAST(2, 15)
uint64_t PyWork::getCompletionKey() const {
  return call<uint64_t>(kGetCompletionKey, [&] { return Work::getCompletionKey(); });
}
#endif

c10::intrusive_ptr<c10d::Work> held_work(c10::intrusive_ptr<c10d::Work> work,
                                         const py::object& python) {
  auto* const type = Py_TYPE(python.ptr());
  const auto* const bound = py::detail::get_type_info(type);
  // A bound C++ class has no overrides in Python.
  if (bound != nullptr && bound->type == type) {
    return work;
  }
  return c10::make_intrusive<HeldWork>(std::move(work), python);
}

}  // namespace commhook
