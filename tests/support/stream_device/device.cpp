// A device with the host's memory, and with operators that run on streams.
//
// An operator returns a tensor at once. Its values come when the stream has run the operator; until
// then memory holds bytes of 0xFF, which are NaN. The host waits only to read values.

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

namespace stream_device {
namespace {

constexpr int kPool = 4;

std::vector<Queue*> all_queues() {
  const std::lock_guard lock(streams().mutex);
  return streams().queues;
}

// Waits as the host does. Throws the error of a failed task of any stream.
void synchronize(Queue& queue, int64_t place) {
  without_gil([&] { queue.reach(place); });
  for (auto* const each : all_queues()) {
    const auto error = each->error();
    TORCH_CHECK(error.empty(), "stream_device: a task failed: ", error);
  }
}

struct DeviceGuard final : Guard {
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    static const auto first = [] {
      const auto id = new_stream();
      for (int i = 1; i < kPool; ++i) {
        new_stream();
      }
      return id;
    }();
    static std::atomic<int> next{0};
    return stream_with(first + next++ % kPool);
  }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_with(new_stream()); }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      const auto recorded = *static_cast<Event*>(event);
      if (!recorded.has_run()) {
        queue_of(stream.id()).add([recorded] { recorded.queue->reach(recorded.place); });
      }
    }
  }
  void synchronizeEvent(void* event) const override {
    const auto& recorded = *static_cast<Event*>(event);
    synchronize(*recorded.queue, recorded.place);
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream.id());
    return queue.has_run(queue.end());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream.id());
    synchronize(queue, queue.end());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (auto* const queue : all_queues()) {
      synchronize(*queue, queue->end());
    }
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    DeviceGuard().synchronizeDevice(0);
    auto memory = storage.allocator()->allocate(size);
    std::memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
    auto* const impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(size);
  }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* const memory = size == 0 ? nullptr : c10::alloc_cpu(size);
    if (memory != nullptr) {
      std::memset(memory, 0xff, size);
    }
    return {memory, memory, &free, kDevice};
  }
  static void free(void* memory) { c10::free_cpu(memory); }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

Memory& memory() {
  static auto& only = *new Memory;
  return only;
}

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory(), kKeys,
                                           c10::dtype_or_default(dtype));
}

Queue& current_queue() { return queue_of(current()); }

void wait_for_current() { synchronize(current_queue(), current_queue().end()); }

// A copy to the host that does not block is there when the stream has run it.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool is_late) {
  if (to.device().type() == kType) {
    // A copy, since the host's tensor may change as soon as the call returns.
    const auto source = self.is_cpu() ? self.clone() : on_host(self);
    current_queue().add([source, target = on_host(to)] { target.copy_(source); });
  } else if (is_late) {
    std::memset(to.data_ptr(), 0xff, to.nbytes());
    current_queue().add([source = on_host(self), to] { to.copy_(source); });
  } else {
    wait_for_current();
    to.copy_(on_host(self));
  }
  return to;
}

at::Scalar item(const at::Tensor& self) {
  wait_for_current();
  return on_host(self).item();
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  if (self.storage().nbytes() > 0) {  // tasks in the queue may use it
    DeviceGuard().synchronizeDevice(0);
  }
  return at::native::resize_(self, size, format);
}

void record_stream(at::Tensor&, c10::Stream) {}

// ---- every other operator -----------------------------------------------------------------------

using Stack = torch::jit::Stack;

// Replaces the device's tensors in a value by other tensors.
template <typename Change>
c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(change(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& each : value.toTensorVector()) {
      tensors.push_back(change(each));
    }
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& each : value.toOptionalTensorVector()) {
      tensors.push_back(each && each->defined() ? std::optional(change(*each)) : each);
    }
    return tensors;
  }
  return value;
}

Stack changed_all(const Stack& stack, at::Device device,
                  const std::function<at::Tensor(const at::Tensor&)>& change) {
  Stack result;
  for (size_t i = 0; i < stack.size(); ++i) {
    const bool is_device = stack[i].isDevice() && stack[i].toDevice().type() == kType;
    result.push_back(is_device ? c10::IValue(device) : changed(stack[i], change));
  }
  return result;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return tensor;
  }
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// The argument that an operator writes and returns as this result; none for new results.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t result) {
  const auto* const alias = schema.returns()[result].alias_info();
  if (alias == nullptr) {
    return std::nullopt;
  }
  TORCH_CHECK(alias->isWrite(), "stream_device: ", schema.name(), " returns a view");
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* const other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
      return i;
    }
  }
  TORCH_CHECK(false, "stream_device: ", schema.name(), " returns what it does not take");
}

// The results with their sizes, without values; none if sizes depend on values.
std::optional<Stack> shapes(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& returns = op.schema().returns();
  const bool may_resize = op.schema().overload_name().find("out") != std::string::npos;
  if (!may_resize && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& each) {
        return each.alias_info() != nullptr;
      })) {
    return Stack(returns.size());  // for results that are written arguments
  }
  for (const auto& each : returns) {
    const auto& type = *each.type();
    if (type.kind() != c10::TypeKind::TensorType &&
        !type.isSubtypeOf(*c10::ListType::ofTensors())) {
      return std::nullopt;
    }
  }
  auto stack = changed_all(arguments, at::kMeta, as_meta);
  try {
    op.callBoxed(stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return stack;
}

at::Tensor on_device_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kDevice));
}

void call_on_host(const c10::OperatorHandle& op, Stack& stack) {
  const at::NoGradGuard no_grad;
  op.callBoxed(stack);
}

void copy_values(const c10::IValue& from, const c10::IValue& to) {
  if (to.isTensor() && to.toTensor().defined()) {
    to.toTensor().copy_(from.toTensor());
  } else if (to.isTensorList()) {
    const auto sources = from.toTensorVector(), targets = to.toTensorVector();
    for (size_t i = 0; i < targets.size(); ++i) {
      targets[i].copy_(sources[i]);
    }
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  std::vector<std::optional<size_t>> written;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    written.push_back(written_argument(schema, i));
  }
  const auto results = shapes(op, arguments);
  std::vector<c10::IValue> targets;
  for (size_t i = 0; results && i < results->size(); ++i) {
    const auto& shape = (*results)[i];
    if (!written[i]) {
      targets.push_back(changed(shape, on_device_like));
      continue;
    }
    targets.push_back(arguments[*written[i]]);
    if (shape.isTensor() && shape.toTensor().sizes() != targets[i].toTensor().sizes()) {
      targets[i].toTensor().resize_(shape.toTensor().sizes());
    }
  }
  auto of_host = changed_all(arguments, at::kCPU, [](const at::Tensor& tensor) {
    if (tensor.device().type() == kType) {
      return on_host(tensor);
    }
    // A copy, since the host's tensor may change as soon as the call returns.
    const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return is_number || !tensor.is_cpu() ? tensor : tensor.clone();
  });
  if (results) {
    std::vector<c10::IValue> new_ones;
    for (size_t i = 0; i < targets.size(); ++i) {
      new_ones.push_back(written[i] ? c10::IValue() : changed(targets[i], on_host));
    }
    current_queue().add([op, of_host, new_ones]() mutable {
      call_on_host(op, of_host);
      for (size_t i = 0; i < new_ones.size(); ++i) {
        copy_values(of_host[i], new_ones[i]);
      }
    });
    stack->insert(stack->end(), targets.begin(), targets.end());
    return;
  }
  wait_for_current();
  call_on_host(op, of_host);
  for (size_t i = 0; i < of_host.size(); ++i) {
    stack->push_back(written[i] ? arguments[*written[i]]
                                : changed(of_host[i], [](const at::Tensor& tensor) {
                                    auto result = on_device_like(tensor);
                                    on_host(result).copy_(tensor);
                                    return result;
                                  }));
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kType, &memory());
  TORCH_INTERNAL_ASSERT(new_stream() == kDefault);
  return true;
}();

}  // namespace

void (*without_gil)(const std::function<void()>&) = [](const std::function<void()>& function) {
  function();
};

void use_cpu_kernels(const std::vector<std::string>& operators) {
  static auto& commhook = *new torch::Library(torch::Library::IMPL, "commhook",
                                              c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& each : operators) {
    commhook.impl(each.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().type() != kType) {
    return tensor;
  }
  const auto options = tensor.options().device(at::kCPU);
  return at::from_blob(
      tensor.numel() == 0 ? nullptr : tensor.data_ptr(), tensor.sizes(), tensor.strides(),
      [storage = tensor.storage()](void*) {}, options.requires_grad(false));
}

}  // namespace stream_device
