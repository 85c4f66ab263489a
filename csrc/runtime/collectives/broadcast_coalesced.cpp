#include "runtime/collectives/broadcast_coalesced.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "commhook/ops.h"
#include "ops/bucket/bucket_dtype.h"
#include "ops/type_names.h"
#include "runtime/collectives/broadcast_buckets.h"
#include "runtime/collectives/broadcast_checks.h"
#include "runtime/process_group/backends.h"
#include "runtime/process_group/py_override.h"
#include "runtime/process_group/py_process_group.h"

namespace commhook {
namespace {

// ---- dtypes ------------------------------------------------------------------------------------

// Views a tensor as a dtype that can copy its elements: a dtype of the fused kernels of the same
// width, since these copy bits when there is no scale. Plain ATen copies single bytes.
at::Tensor as_words(const at::Tensor& tensor) {
  if (is_bucket_dtype(tensor.scalar_type())) {
    return tensor;
  }
  if (tensor.is_complex()) {
    return at::view_as_real(tensor);
  }
  switch (tensor.element_size()) {
    case 1:
      return tensor.view(at::kByte);
    case 2:
      return tensor.view(at::kHalf);
    case 4:
      return tensor.view(at::kFloat);
    case 8:
      return tensor.view(at::kDouble);
    default:
      TORCH_CHECK_TYPE(false, kBroadcastCoalesced,
                       ": tensors must have elements of 1, 2, 4 or 8 bytes, got ",
                       dtype_name(tensor.scalar_type()));
  }
}

// The dtype on the wire: the tensor's own if all backends know it, else bytes.
at::ScalarType sent_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return dtype;
    default:
      return is_bucket_dtype(dtype)      ? dtype
             : c10::isComplexType(dtype) ? c10::toRealValueType(dtype)
                                         : at::kByte;
  }
}

// ---- buckets -----------------------------------------------------------------------------------

// A number for each dtype on each device.
std::vector<int64_t> kinds_of(at::TensorList tensors) {
  std::map<std::tuple<at::ScalarType, c10::DeviceType, int>, int64_t> numbers;
  std::vector<int64_t> kinds;
  kinds.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    const auto device = tensor.device();
    const auto next = static_cast<int64_t>(numbers.size());
    const std::tuple key(tensor.scalar_type(), device.type(), device.index());
    kinds.push_back(numbers.emplace(key, next).first->second);
  }
  return kinds;
}

// The tensors without repetitions, such as tied weights.
std::vector<at::Tensor> different(at::TensorList tensors) {
  using Identity = std::tuple<const void*, std::vector<int64_t>, std::vector<int64_t>,
                              at::ScalarType, c10::DeviceType, int, bool, bool>;
  std::set<Identity> seen;
  std::vector<at::Tensor> found;
  found.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    const bool has_memory = tensor.defined() && tensor.layout() == at::kStrided &&
                            !tensor.is_meta() && !tensor._is_zerotensor() && tensor.numel() > 0;
    const auto is_new = [&] {
      const auto device = tensor.device();
      return seen
          .emplace(tensor.const_data_ptr(), tensor.sizes().vec(), tensor.strides().vec(),
                   tensor.scalar_type(), device.type(), device.index(), tensor.is_conj(),
                   tensor.is_neg())
          .second;
    };
    if (!has_memory || is_new()) {
      found.push_back(tensor);
    }
  }
  return found;
}

// The tensors, with large ones cut into pieces.
std::vector<at::Tensor> cut(at::TensorList tensors) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> pieces;
  pieces.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    if (const auto cut = cut_of(tensor.sizes(), tensor.element_size())) {
      const auto of_tensor = tensor.split(cut->length, cut->dim);
      pieces.insert(pieces.end(), of_tensor.begin(), of_tensor.end());
    } else {
      pieces.push_back(tensor);
    }
  }
  return pieces;
}

std::vector<Bucket> buckets_of(at::TensorList tensors, int64_t buffer_size) {
  std::vector<int64_t> bytes;
  bytes.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
  }
  return make_buckets(bytes, kinds_of(tensors), buffer_size);
}

// The steps of one rank for each bucket.
struct Duty {
  bool gather;     // copy the tensors into the buffer
  bool broadcast;  // broadcast the buffer
  bool scatter;    // copy the buffer into the tensors
};

// A compiled backend leaves the source's buffer unchanged and writes to all others. Another one may
// not, so all ranks then take its result.
class Duties {
 public:
  Duties(c10d::ProcessGroup& group, int64_t source)
      : group_(group), is_alone_(group.getSize() == 1), is_source_(group.getRank() == source) {}

  Duty on(at::Device device) const {
    if (has_compiled_backend(group_, device.type())) {
      return {is_source_ && !is_alone_, !is_alone_, !is_source_};
    }
    return {true, true, true};
  }

 private:
  c10d::ProcessGroup& group_;
  const bool is_alone_;
  const bool is_source_;
};

// If the method returns no Work, PyTorch's own class for Python groups would end the process. So
// this calls the method as this library's class does, and checks its result.
c10::intrusive_ptr<c10d::Work> checked_broadcast(c10d::ProcessGroup& group,
                                                 std::vector<at::Tensor>& sent,
                                                 const c10d::BroadcastOptions& options) {
  static const PyMethod method{"broadcast"};
  const auto in_cpp = [&] { return group.broadcast(sent, options); };
  if (typeid(group) == typeid(c10d::ProcessGroup) || typeid(group) == typeid(PyProcessGroup)) {
    return in_cpp();
  }
  return call_override<c10::intrusive_ptr<c10d::Work>>(
      &group, method, [&] { return python_object_of(group); }, in_cpp, sent, options);
}

// One of the two broadcasts that may be in flight, with the memory for its bucket.
class Flight {
 public:
  bool is_busy() const { return work_ != nullptr; }

  // `capacity`: the memory's size in bytes, if a bucket needs memory.
  void start(c10d::ProcessGroup& group, at::TensorList tensors, const Bucket& bucket, int64_t rank,
             Duty duty, int64_t capacity) {
    if (!duty.broadcast) {
      return;
    }
    std::vector<at::Tensor> sent{gather(tensors, bucket, duty, capacity)};
    c10d::BroadcastOptions options;
    options.rootRank = rank;
    work_ = checked_broadcast(group, sent, options);
    TORCH_CHECK_TYPE(work_, kBroadcastCoalesced,
                     ": broadcast of the process group must return a Work, got a null pointer");
  }

  void finish() {
    std::exchange(work_, nullptr)->wait();
    if (buffer_.defined() && is_written_) {
      scatter();
    }
  }

  // Waits for the broadcast in flight and ignores its error.
  void drain() noexcept {
    if (work_ != nullptr) {
      try {
        std::exchange(work_, nullptr)->wait();
      } catch (...) {  // NOLINT: the first error is the one that is told
      }
    }
  }

 private:
  // Returns the tensor to broadcast: a contiguous tensor itself, or the buffer, filled if `duty`
  // says so.
  at::Tensor gather(at::TensorList tensors, const Bucket& bucket, Duty duty, int64_t capacity) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // run() has dealt with autograd
    pieces_.clear();
    lazy_.clear();
    buffer_ = at::Tensor();
    const auto& first = tensors[bucket.indices.front()];
    const auto sent = sent_dtype(first.scalar_type());
    for (const auto index : bucket.indices) {
      const auto& tensor = tensors[index];
      if (tensor.is_conj() || tensor.is_neg()) {  // its memory holds other values
        lazy_.emplace_back(tensor, tensor.resolve_conj().resolve_neg());
        pieces_.push_back(as_words(lazy_.back().second));
      } else {
        pieces_.push_back(as_words(tensor));
      }
    }
    if (pieces_.size() == 1 && lazy_.empty() && pieces_[0].is_contiguous()) {
      return pieces_[0].view(-1).view(sent);
    }
    if (!memory_.defined() || memory_.device() != first.device() ||
        static_cast<int64_t>(memory_.nbytes()) < bucket.bytes) {
      memory_ = at::Tensor();  // frees it before the next is allocated
      memory_ = at::empty({std::max(capacity, bucket.bytes)}, first.options().dtype(at::kByte));
    }
    buffer_ = memory_.narrow(0, 0, bucket.bytes).view(pieces_[0].scalar_type());
    if (duty.gather) {
      if (is_plain()) {
        at::_foreach_copy_(parts_of_buffer(), pieces_);
      } else {
        ops::flatten_out(pieces_, 1.0, buffer_);
      }
    }
    is_written_ = duty.scatter;
    return buffer_.view(sent);
  }

  void scatter() {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (is_plain()) {
      at::_foreach_copy_(pieces_, parts_of_buffer());
    } else {
      ops::unflatten_into(buffer_, pieces_);
    }
    for (const auto& [tensor, resolved] : lazy_) {
      tensor.copy_(resolved);
    }
  }

  // Also true for single tensors that are not contiguous: ATen transposes these in blocks.
  bool is_plain() const { return pieces_.size() == 1 || buffer_.scalar_type() == at::kByte; }

  std::vector<at::Tensor> parts_of_buffer() const {
    std::vector<at::Tensor> parts;
    parts.reserve(pieces_.size());
    int64_t offset = 0;
    for (const auto& piece : pieces_) {
      parts.push_back(buffer_.narrow(0, offset, piece.numel()).view(piece.sizes()));
      offset += piece.numel();
    }
    return parts;
  }

  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor memory_;  // reused by the next bucket
  at::Tensor buffer_;  // the bucket's part of it; undefined if a tensor is sent from its own memory
  bool is_written_ = false;
  std::vector<at::Tensor> pieces_;
  std::vector<std::pair<at::Tensor, at::Tensor>> lazy_;  // lazy tensors, and their values
};

void broadcast_buckets(c10d::ProcessGroup& group, at::TensorList tensors,
                       const std::vector<Bucket>& buckets, int64_t rank) {
  int64_t capacity = 0;
  for (const auto& bucket : buckets) {
    if (bucket.indices.size() > 1) {
      capacity = std::max(capacity, bucket.bytes);
    }
  }
  const Duties duties(group, rank);
  std::array<Flight, 2> flights;
  try {
    for (size_t i = 0; i < buckets.size(); ++i) {
      auto& flight = flights[i % flights.size()];
      if (flight.is_busy()) {
        flight.finish();
      }
      const auto device = tensors[buckets[i].indices.front()].device();
      flight.start(group, tensors, buckets[i], rank, duties.on(device), capacity);
    }
    for (size_t i = buckets.size(); i < buckets.size() + flights.size(); ++i) {
      auto& flight = flights[i % flights.size()];
      if (flight.is_busy()) {
        flight.finish();
      }
    }
  } catch (...) {
    for (auto& flight : flights) {
      flight.drain();
    }
    throw;
  }
}

void run(c10d::ProcessGroup& group, at::TensorList given, int64_t buffer_size, int64_t rank) {
  const auto tensors = different(given);
  check_broadcast_coalesced(tensors, buffer_size, rank, group.getSize());
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) {
      torch::autograd::increment_version(tensor);
    }
  }
  const auto pieces = cut(tensors);
  broadcast_buckets(group, pieces, buckets_of(pieces, buffer_size), rank);
}

// ---- the operator ------------------------------------------------------------------------------

const auto& broadcast_coalesced_op() {
  static const auto op = ops::find_op<void(at::TensorList, int64_t, int64_t, std::string_view)>(
      "commhook::broadcast_coalesced");
  return op;
}

void broadcast_coalesced_by_name(at::TensorList tensors, int64_t buffer_size, int64_t rank,
                                 std::string_view group_name) {
  const auto group = c10d::resolve_process_group(std::string(group_name));
  run(*group, tensors, buffer_size, rank);
}

// The kernel below checks too; here the check also reports an error under tracing.
void check_broadcast_coalesced_grad(at::TensorList tensors, int64_t buffer_size, int64_t rank,
                                    std::string_view group_name) {
  check_broadcast_not_recorded(tensors);
  at::AutoDispatchBelowAutograd guard;
  broadcast_coalesced_op().call(tensors, buffer_size, rank, group_name);
}

bool overrides_dispatch(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has_any(c10::DispatchKeySet(
                                 {c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

// Registered in the runtime, since the operators' library knows no process groups. In C++, so that
// it runs without the GIL, also in compiled code.
TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("broadcast_coalesced", broadcast_coalesced_by_name);
}
TORCH_LIBRARY_IMPL(commhook, Autograd, m) {
  m.impl("broadcast_coalesced", check_broadcast_coalesced_grad);
}
// The operator itself handles tensors with a conjugate or negative bit, and moves versions.
TORCH_LIBRARY_IMPL(commhook, Conjugate, m) {
  m.impl("broadcast_coalesced", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(commhook, Negative, m) {
  m.impl("broadcast_coalesced", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(commhook, ZeroTensor, m) {
  m.impl("broadcast_coalesced", torch::CppFunction::makeFallthrough());
}

}  // namespace

void broadcast_coalesced(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         at::TensorList tensors, int64_t buffer_size, int64_t rank) {
  if (c10::impl::dispatch_mode_enabled() ||
      std::any_of(tensors.begin(), tensors.end(), overrides_dispatch)) {
    broadcast_coalesced_op().call(tensors, buffer_size, rank, group->getGroupName());
    return;
  }
  run(*group, tensors, buffer_size, rank);
}

}  // namespace commhook
