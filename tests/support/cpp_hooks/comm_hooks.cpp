// Communication hooks for tests: hooks that work, and hooks with each possible mistake.
#include <Python.h>
#include <commhook/comm_hook.h>

#include <chrono>
#include <fstream>
#include <map>
#include <stdexcept>
#include <thread>

namespace {

using c10::ivalue::Future;
using commhook::GradBucket;
using FuturePtr = c10::intrusive_ptr<Future>;

FuturePtr mean(GradBucket& bucket) {
  return commhook::allReduce(bucket,
                             bucket.scaledBuffer(1.0 / bucket.getProcessGroup()->getSize()));
}

FuturePtr completed(const c10::TypePtr& type, c10::IValue value) {
  auto future = c10::make_intrusive<Future>(type);
  future->markCompleted(std::move(value));
  return future;
}

// Makes the mistake that its option names.
class Wrong : public commhook::CommHookInterface {
 public:
  explicit Wrong(std::string how) : how_(std::move(how)) {
    if (how_ == "constructor") {
      throw std::runtime_error("no such thing");
    }
  }

  FuturePtr runHook(GradBucket& bucket) override {
    TORCH_CHECK_VALUE(how_ != "value", "a value that does not fit");
    if (how_ == "raises") {
      throw std::runtime_error("out of order");
    }
    if (how_ == "throws an int") {
      throw 42;
    }
    if (how_ == "null") {
      return {};
    }
    if (how_ == "never") {
      return c10::make_intrusive<Future>(c10::TensorType::get());
    }
    if (how_ == "fails later") {
      auto future = c10::make_intrusive<Future>(c10::TensorType::get());
      future->setError(std::make_exception_ptr(std::runtime_error("lost on the way")));
      return future;
    }
    if (how_ == "throws an int later") {
      auto future = c10::make_intrusive<Future>(c10::TensorType::get());
      std::thread([future] { future->setError(std::make_exception_ptr(42)); }).detach();
      return future;
    }
    if (how_ == "sets no buffer") {
      bucket.setBuffer(at::Tensor());
    }
    if (how_ == "takes the buffer") {
      const at::Tensor taken = std::move(bucket.getBufferRef());
      return commhook::completedFuture(bucket.scaledBuffer(1.0));
    }
    const auto& buffer = bucket.getBuffer();
    if (how_ == "two") {
      return completed(c10::ListType::ofTensors(), c10::List<at::Tensor>({buffer, buffer}));
    }
    if (how_ == "number") {
      return completed(c10::IntType::get(), 1);
    }
    if (how_ == "undefined") {
      return completed(c10::TensorType::get(), at::Tensor());
    }
    if (how_ == "short") {
      return commhook::completedFuture(buffer.slice(0, 1));
    }
    if (how_ == "dtype") {
      return commhook::completedFuture(buffer.to(at::kDouble));
    }
    return mean(bucket);
  }

  at::ScalarType resultDtype(const GradBucket& bucket) const override {
    return how_ == "result dtype" ? at::kInt : bucket.dtype();
  }

 private:
  const std::string how_;
};
COMMHOOK_REGISTER_HOOK(Wrong, "wrong", commhook::Option<std::string>("how"));

// Fails in one of its buckets, once in `every` of them.
class FailsAt : public commhook::CommHookInterface {
 public:
  explicit FailsAt(int64_t call) : call_(call) {}
  FuturePtr runHook(GradBucket& bucket) override {
    TORCH_CHECK_VALUE(++calls_ != call_, "call ", calls_);
    return mean(bucket);
  }

 private:
  const int64_t call_;
  int64_t calls_ = 0;
};
COMMHOOK_REGISTER_HOOK(FailsAt, "fails_at", commhook::Option<int64_t>("call"));

// Reports the values of its options.
class Options : public commhook::CommHookInterface {
 public:
  Options(bool flag, int64_t level, double factor, std::string name, at::ScalarType dtype)
      : text_(c10::str(flag, " ", level, " ", factor, " ", name, " ", dtype)) {}
  FuturePtr runHook(GradBucket& /*bucket*/) override { TORCH_CHECK(false, "options: ", text_); }

 private:
  const std::string text_;
};
COMMHOOK_REGISTER_HOOK(Options, "options", commhook::Option<bool>("flag", false),
                       commhook::Option<int64_t>("level", 3).atLeast(1).below(10),
                       commhook::Option<double>("factor", 0.5).above(0).atMost(1),
                       commhook::Option<std::string>("name", "a").oneOf({"a", "b"}),
                       commhook::Option<at::ScalarType>("dtype", at::kFloat)
                           .where("no complex dtype", [](const at::ScalarType& dtype) {
                             return !c10::isComplexType(dtype);
                           }));

// Returns the mean of this rank alone, after a while. If it has a path, it creates a file there
// when it starts.
class Late : public commhook::CommHookInterface {
 public:
  Late(double seconds, std::string marker) : seconds_(seconds), marker_(std::move(marker)) {}
  FuturePtr runHook(GradBucket& bucket) override {
    auto future = c10::make_intrusive<Future>(c10::TensorType::get());
    std::thread([future, buffer = bucket.getBuffer(), seconds = seconds_] {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      future->markCompleted(buffer);
    }).detach();
    if (!marker_.empty()) {
      std::ofstream{marker_};
    }
    return future;
  }

 private:
  const double seconds_;
  const std::string marker_;
};
COMMHOOK_REGISTER_HOOK(Late, "late", commhook::Option<double>("seconds"),
                       commhook::Option<std::string>("marker", ""));

// Returns an average in the first parameter's gradient instead of the buffer.
class InGradient : public commhook::CommHookInterface {
 public:
  FuturePtr runHook(GradBucket& bucket) override {
    const auto& gradient = bucket.getParameters().front().grad();
    gradient.mul_(1.0 / bucket.getProcessGroup()->getSize());
    return commhook::allReduce(bucket, gradient.view({-1}));
  }
};
COMMHOOK_REGISTER_HOOK(InGradient, "in_gradient");

// Its constructor needs the GIL, and releases it to other threads meanwhile.
class TakesTheGil : public commhook::CommHookInterface {
 public:
  TakesTheGil() {
    const auto gil = PyGILState_Ensure();
    PyThreadState* const thread = PyEval_SaveThread();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    PyEval_RestoreThread(thread);
    PyGILState_Release(gil);
  }
  FuturePtr runHook(GradBucket& bucket) override { return mean(bucket); }
};
COMMHOOK_REGISTER_HOOK(TakesTheGil, "takes_the_gil");

// Uses all methods of a bucket, and writes each gradient separately.
class Gradients : public commhook::CommHookInterface {
 public:
  FuturePtr runHook(GradBucket& bucket) override {
    const auto gradients = bucket.getGradients();
    const auto& parameters = bucket.getParameters();
    TORCH_CHECK(gradients.size() == parameters.size(), "gradients");
    TORCH_CHECK(bucket.isLast() == (bucket.getIndex() + 1 == bucket.getBucketCount()), "isLast");
    if (parameters[0].is_complex() && !bucket.getBuffer().is_complex()) {
      TORCH_CHECK(gradients[0].is_complex(), "complex");
      for (const auto& gradient : gradients) {
        gradient.mul_(1.0 / bucket.getProcessGroup()->getSize());
      }
      return commhook::allReduce(bucket, bucket.getBuffer());
    }
    int64_t elements = 0;
    for (size_t i = 0; i < gradients.size(); ++i) {
      TORCH_CHECK(gradients[i].sizes() == parameters[i].sizes(), "sizes");
      TORCH_CHECK(gradients[i].strides() == parameters[i].strides(), "strides");
      elements += gradients[i].numel();
      gradients[i].mul_(1.0 / bucket.getProcessGroup()->getSize());
    }
    TORCH_CHECK(elements == bucket.numel() && bucket.dtype() == gradients[0].scalar_type(),
                "numel");
    return commhook::allReduce(bucket, bucket.getBuffer());
  }
};
COMMHOOK_REGISTER_HOOK(Gradients, "gradients");

// Sends nothing, and does not report its traffic. Replaces the buffer.
class Alone : public commhook::CommHookInterface {
 public:
  FuturePtr runHook(GradBucket& bucket) override {
    bucket.setBuffer(bucket.flatten(2.0, bucket.dtype()));
    return commhook::completedFuture(bucket.getBuffer());
  }
};
COMMHOOK_REGISTER_HOOK(Alone, "alone");

// Has a state, and its own parseHookResult().
class Counted : public commhook::CppCommHookInterface<std::map<size_t, int64_t>> {
 public:
  Counted() : CppCommHookInterface({}) {}
  FuturePtr runHook(GradBucket& bucket) override {
    ++state_[bucket.getIndex()];
    return mean(bucket);
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return commhook::parseCppCommHookResult(result) * static_cast<double>(state_.at(0));
  }
};
COMMHOOK_REGISTER_HOOK(Counted, "counted");

// Written for PyTorch's interface.
class TorchAllReduce : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  FuturePtr runHook(c10d::GradBucket& bucket) override {
    std::vector<at::Tensor> tensors{bucket.getBufferRef().div_(state_->getSize())};
    return state_->allreduce(tensors)->getFuture();
  }
};
COMMHOOK_REGISTER_HOOK(TorchAllReduce, "torch_allreduce");

class TorchStyle : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  TorchStyle(const c10::intrusive_ptr<c10d::ProcessGroup>& group, double scale)
      : CppCommHookInterface(group), scale_(scale) {}
  FuturePtr runHook(c10d::GradBucket& bucket) override {
    std::vector<at::Tensor> tensors{bucket.getBufferRef()};
    const double ranks = state_->getSize();
    TORCH_CHECK(bucket.getGradients().size() == bucket.getParameters().size(), "gradients");
    return state_->allreduce(tensors)->getFuture()->then(
        [scale = scale_ / ranks](Future& done) {
          return c10::IValue(c10d::detail::parseCppCommHookResult(done.value()).mul(scale));
        },
        c10::TensorType::get());
  }

 private:
  const double scale_;
};
COMMHOOK_REGISTER_HOOK(TorchStyle, "torch_style", commhook::Option<double>("scale", 1.0));

}  // namespace
