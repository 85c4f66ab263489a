#include "runtime/autograd_hooks.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "ops/dtype_name.h"
#include "runtime/hook_names.h"
#include "runtime/hook_result.h"

namespace py = pybind11;
using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::dynamo::autograd::CompiledNodeArgs;

namespace commhook {
namespace {

// ---- checks
// --------------------------------------------------------------------------------------

// "torch.sparse_csr" for kSparseCsr.
std::string layout_name(at::Layout layout) {
  std::string name;
  for (const char letter : c10::str(layout)) {
    if (std::isupper(static_cast<unsigned char>(letter)) != 0 && !name.empty()) {
      name += '_';
    }
    name += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  }
  return "torch." + (name == "sparse" ? "sparse_coo" : name);
}

std::string described(const at::Tensor& tensor) {
  return dtype_name(tensor.scalar_type()) + ", " + layout_name(tensor.layout()) + ", " +
         tensor.device().str();
}

// "hook 'f'", and which of several values.
std::string where(const AutogradHook& hook, HookKind kind, size_t index, size_t count) {
  std::string text = "hook '" + hook.name() + "'";
  if (kind == HookKind::kPre || kind == HookKind::kPost) {
    text += c10::str(", value ", index, " of ", count);
  }
  return text;
}

void check_value(const at::Tensor& was, const at::Tensor& now, const AutogradHook& hook,
                 HookKind kind, size_t index, size_t count) {
  TORCH_CHECK(was.defined(), where(hook, kind, index, count),
              ": can't replace a None gradient with a non-None value");
  TORCH_CHECK(was.scalar_type() == now.scalar_type() && was.layout() == now.layout() &&
                  was.device() == now.device(),
              where(hook, kind, index, count), " has changed the type of value (was ",
              described(was), ", got ", described(now), ")");
  TORCH_CHECK(was.sym_sizes() == now.sym_sizes(), where(hook, kind, index, count),
              " has changed the size of value (was ", was.sym_sizes(), ", got ", now.sym_sizes(),
              ")");
}

// ---- native hooks
// --------------------------------------------------------------------------------

c10::IValue argument(const c10::Argument& formal, const variable_list& values) {
  if (formal.type()->isSubtypeOf(*c10::TensorType::get())) {
    return values[0];
  }
  if (formal.type()->isSubtypeOf(*c10::ListType::ofTensors())) {
    return c10::List<at::Tensor>(at::ArrayRef<at::Tensor>(values));
  }
  c10::List<std::optional<at::Tensor>> list;
  list.reserve(values.size());
  for (const auto& value : values) {
    list.push_back(value.defined() ? std::optional(value) : std::nullopt);
  }
  return list;
}

// What is asked of an operator's schema.
void check_schema(const c10::FunctionSchema& schema, HookKind kind) {
  const auto& formals = schema.arguments();
  const bool several = kind == HookKind::kPre || kind == HookKind::kPost;
  const size_t needed = kind == HookKind::kPost ? 2 : 1;
  const auto of_tensors = [](const c10::TypePtr& type) {
    return type->isSubtypeOf(*c10::ListType::ofTensors()) ||
           type->isSubtypeOf(*c10::ListType::ofOptionalTensors());
  };
  bool fits = formals.size() >= needed;
  for (size_t i = 0; fits && i < formals.size(); ++i) {
    const auto& type = formals[i].type();
    fits = i >= needed ? formals[i].default_value().has_value()
           : several   ? of_tensors(type)
                       : type->isSubtypeOf(*c10::TensorType::get());
  }
  const auto& returns = schema.returns();
  if (kind == HookKind::kPostAccumulate) {
    fits = fits && returns.empty();
  } else if (!returns.empty()) {
    fits = fits && returns.size() == 1 &&
           (several ? of_tensors(returns[0].type())
                    : returns[0].type()->isSubtypeOf(*c10::TensorType::get()));
  }
  const char* contract = kind == HookKind::kTensor           ? "(Tensor) -> Tensor or ()"
                         : kind == HookKind::kPostAccumulate ? "(Tensor) -> ()"
                         : kind == HookKind::kPre ? "(Tensor[]) -> Tensor[] or ()"
                                                  : "(Tensor[], Tensor[]) -> Tensor[] or ()";
  TORCH_CHECK_TYPE(fits, "an operator as this kind of hook must take and return ", contract,
                   ", got ", schema);
}

NativeHook operator_hook(const std::string& name, const std::string& overload, HookKind kind) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  TORCH_CHECK_TYPE(found, "a hook must be one operator, got ", name, overload.empty() ? "" : ".",
                   overload, ", which the dispatcher does not know");
  const auto op = *found;
  const auto& schema = op.schema();
  check_schema(schema, kind);
  return [op, kind](const variable_list& values, const variable_list& others) {
    const auto& schema = op.schema();
    torch::jit::Stack stack;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& formal = schema.arguments()[i];
      if (i == 0 || (i == 1 && kind == HookKind::kPost)) {
        stack.push_back(argument(formal, i == 0 ? values : others));
      } else {
        stack.push_back(*formal.default_value());
      }
    }
    op.callBoxed(stack);
    if (schema.returns().empty()) {
      return values;
    }
    if (stack.back().isTensor()) {
      return variable_list{stack.back().toTensor()};
    }
    variable_list results;
    for (const auto& value : stack.back().toListRef()) {
      results.push_back(value.isNone() ? at::Tensor() : value.toTensor());
    }
    return results;
  };
}

// ---- running
// -------------------------------------------------------------------------------------

py::object wrapped(const at::Tensor& tensor) {
  return tensor.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor))
                          : py::object(py::none());
}

py::tuple tuple_of(const variable_list& values) {
  py::tuple tuple(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), i, wrapped(values[i]).release().ptr());
  }
  return tuple;
}

// Calls a hook in Python. Needs the GIL.
py::object called(const AutogradHook& hook, PyObject* const* arguments, size_t count) {
  auto result = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(hook.callable().get().ptr(), arguments, count, nullptr));
  if (!result) {
    py::error_already_set error;
    std::rethrow_exception(persistent(error));
  }
  return result;
}

// What a hook has returned for one value.
const at::Tensor& checked(const py::object& result, const at::Tensor& was, const AutogradHook& hook,
                          HookKind kind, size_t index, size_t count) {
  TORCH_CHECK(kind != HookKind::kPostAccumulate, where(hook, kind, index, count),
              ": Tensor post accumulate grad hooks should return None.");
  TORCH_CHECK(was.defined(), where(hook, kind, index, count),
              ": can't replace a None gradient with a non-None value");
  TORCH_CHECK_TYPE(THPVariable_Check(result.ptr()), where(hook, kind, index, count),
                   ": expected Variable, but hook returned '", Py_TYPE(result.ptr())->tp_name, "'");
  const auto& now = THPVariable_Unpack(result.ptr());
  check_value(was, now, hook, kind, index, count);
  return now;
}

// Runs a list of hooks: the values in C++, in Python, or both, as the hooks ask for them.
class Run {
 public:
  Run(HookKind kind, variable_list values, const variable_list& others)
      : kind_(kind), values_(std::move(values)), others_(others) {}

  ~Run() {
    if (in_python_ || python_others_) {
      py::gil_scoped_acquire gil;
      drop_python();
    }
  }

  // Needs the GIL.
  void drop_python() {
    in_python_ = py::object();
    python_others_ = py::object();
  }

  void python(const AutogradHook& hook) {
    if (!in_python_) {
      in_python_ = several() ? py::object(tuple_of(values_)) : wrapped(values_[0]);
    }
    PyObject* arguments[2] = {in_python_.ptr(), nullptr};
    size_t count = 1;
    if (kind_ == HookKind::kPost) {
      if (!python_others_) {
        python_others_ = tuple_of(others_);
      }
      arguments[count++] = python_others_.ptr();
    }
    const auto result = called(hook, arguments, count);
    if (result.is_none() || result.is(in_python_)) {
      return;
    }
    if (several()) {
      take_tuple(hook, result);
    } else {
      values_[0] = checked(result, values_[0], hook, kind_, 0, 1);
      in_python_ = result;
    }
  }

  void native(const AutogradHook& hook) {
    variable_list results = hook.native()(values_, others_);
    if (kind_ == HookKind::kPostAccumulate) {
      return;
    }
    check_count(hook, results.size());
    bool changed = false;
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].is_same(values_[i])) {
        continue;
      }
      if (results[i].defined()) {
        check_value(values_[i], results[i], hook, kind_, i, results.size());
      }
      values_[i] = std::move(results[i]);
      changed = true;
    }
    if (changed && in_python_) {
      py::gil_scoped_acquire gil;
      in_python_ = py::object();
    }
  }

  variable_list values() { return std::move(values_); }

 private:
  bool several() const { return kind_ == HookKind::kPre || kind_ == HookKind::kPost; }

  void check_count(const AutogradHook& hook, size_t count) const {
    TORCH_CHECK(count == values_.size(), "hook '", hook.name(),
                "' has returned an incorrect number of values (got ", count, ", but expected ",
                values_.size(), ")");
  }

  void take_tuple(const AutogradHook& hook, const py::object& result) {
    TORCH_CHECK_TYPE(PyTuple_Check(result.ptr()), "hook '", hook.name(),
                     "': expected tuple, but hook returned '", Py_TYPE(result.ptr())->tp_name, "'");
    const auto before = py::reinterpret_borrow<py::tuple>(in_python_);
    const auto after = py::reinterpret_borrow<py::tuple>(result);
    check_count(hook, after.size());
    for (size_t i = 0; i < after.size(); ++i) {
      const py::object value = after[i];
      if (value.is_none()) {
        values_[i] = at::Tensor();
      } else if (!value.is(before[i])) {
        values_[i] = checked(value, values_[i], hook, kind_, i, after.size());
      }
    }
    in_python_ = result;
  }

  const HookKind kind_;
  variable_list values_;
  const variable_list& others_;
  py::object in_python_;  // the values, where they have been needed there
  py::object python_others_;
};

// ---- what the engine holds
// -----------------------------------------------------------------------

template <typename Base>
class Held : public Base {
 public:
  explicit Held(std::shared_ptr<HookList> list) : list_(std::move(list)) {}
  const std::shared_ptr<HookList>& list() const { return list_; }

 protected:
  std::shared_ptr<HookList> list_;
};

class TensorHooks : public Held<FunctionPreHook> {
 public:
  TensorHooks(std::shared_ptr<HookList> list, size_t output)
      : Held(std::move(list)), output_(output) {}
  size_t output() const { return output_; }

  variable_list operator()(const variable_list& grads) override {
    const auto hooks = list_->snapshot();
    if (!hooks || !grads.at(output_).defined()) {
      return grads;
    }
    const auto output = output_;  // a hook may drop what this belongs to
    variable_list results = grads;
    results[output] = run_autograd_hooks(hooks, HookKind::kTensor, grads[output]);
    return results;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    py::gil_scoped_acquire gil;
    each_traced(*list_, [&](c10::SafePyObject hook) {
      args.add_tensor_pre_hook(std::move(hook), static_cast<int>(output_));
    });
  }

 private:
  size_t output_;
};

class PreHooks : public Held<FunctionPreHook> {
 public:
  using Held::Held;

  variable_list operator()(const variable_list& grads) override {
    const auto hooks = list_->snapshot();
    return hooks ? run_autograd_hooks(hooks, HookKind::kPre, grads, {}) : grads;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    py::gil_scoped_acquire gil;
    each_traced(*list_, [&](c10::SafePyObject hook) { args.add_pre_hook(std::move(hook)); });
  }
};

class PostHooks : public Held<FunctionPostHook> {
 public:
  using Held::Held;

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    const auto hooks = list_->snapshot();
    return hooks ? run_autograd_hooks(hooks, HookKind::kPost, outputs, inputs) : outputs;
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    py::gil_scoped_acquire gil;
    each_traced(*list_, [&](c10::SafePyObject hook) { args.add_post_hook(std::move(hook)); });
  }
};

// The list of one of our hooks that is there already.
template <typename Ours, typename Hooks, typename Fits>
std::shared_ptr<HookList> find(const Hooks& hooks, const Fits& fits) {
  for (const auto& hook : hooks) {
    const auto* ours = dynamic_cast<const Ours*>(hook.get());
    if (ours != nullptr && fits(*ours)) {
      return ours->list();
    }
  }
  return nullptr;
}

Registered added(const std::shared_ptr<HookList>& list, std::shared_ptr<const AutogradHook> hook) {
  return {list, list->add(std::move(hook))};
}

using NodePtr = std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())>;

// What a Python function holds of its node is weak before torch 2.13.
NodePtr locked(const NodePtr& node) { return node; }
template <typename Weak>
NodePtr locked(const Weak& node) {
  return node.lock();
}

NodePtr node_of(const py::object& node) {
  if (torch::autograd::THPCppFunction_Check(node.ptr())) {
    return reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata;
  }
  if (THPFunction_Check(node.ptr())) {
    return locked(reinterpret_cast<THPFunction*>(node.ptr())->cdata);
  }
  return {};
}

}  // namespace

HookKind hook_kind(const std::string& name) {
  if (name == "tensor") {
    return HookKind::kTensor;
  }
  if (name == "prehook") {
    return HookKind::kPre;
  }
  if (name == "posthook") {
    return HookKind::kPost;
  }
  TORCH_CHECK_VALUE(name == "post_accumulate",
                    "kind must be 'tensor', 'prehook', 'posthook' or 'post_accumulate', got '",
                    name, "'");
  return HookKind::kPostAccumulate;
}

AutogradHook::AutogradHook(py::object callable, const std::optional<std::string>& op_name,
                           const std::string& op_overload, py::object traced, HookKind kind)
    : callable_(std::move(callable)), traced_(std::move(traced)) {
  if (op_name) {
    native_ = operator_hook(*op_name, op_overload, kind);
  }
}

std::string AutogradHook::name() const {
  py::gil_scoped_acquire gil;
  return hook_name(callable_.get());
}

int64_t HookList::add(std::shared_ptr<const AutogradHook> hook) {
  const std::lock_guard lock(mutex_);
  auto hooks = hooks_ ? *hooks_ : std::vector<std::shared_ptr<const AutogradHook>>();
  hooks.push_back(std::move(hook));
  hooks_ = std::make_shared<const std::vector<std::shared_ptr<const AutogradHook>>>(hooks);
  ids_.push_back(next_id_);
  return next_id_++;
}

void HookList::remove(int64_t id) {
  Snapshot dropped;  // without the lock: it may be the last reference to a Python object
  const std::lock_guard lock(mutex_);
  const auto place = std::find(ids_.begin(), ids_.end(), id);
  if (place == ids_.end()) {
    return;
  }
  auto hooks = *hooks_;
  hooks.erase(hooks.begin() + (place - ids_.begin()));
  ids_.erase(place);
  dropped = std::exchange(
      hooks_,
      hooks.empty()
          ? nullptr
          : std::make_shared<const std::vector<std::shared_ptr<const AutogradHook>>>(hooks));
}

bool HookList::contains(int64_t id) const {
  const std::lock_guard lock(mutex_);
  return std::find(ids_.begin(), ids_.end(), id) != ids_.end();
}

HookList::Snapshot HookList::snapshot() const {
  const std::lock_guard lock(mutex_);
  return hooks_;
}

variable_list run_autograd_hooks(const HookList::Snapshot& hooks, HookKind kind,
                                 variable_list values, const variable_list& others) {
  Run run(kind, std::move(values), others);
  std::optional<py::gil_scoped_acquire> gil;
  for (const auto& hook : *hooks) {
    if (hook->is_native()) {
      gil.reset();
      run.native(*hook);
    } else {
      if (!gil) {
        gil.emplace();
      }
      run.python(*hook);
    }
  }
  if (gil) {
    run.drop_python();
  }
  return run.values();
}

at::Tensor run_autograd_hooks(const HookList::Snapshot& hooks, HookKind kind,
                              const at::Tensor& value) {
  const auto is_native = [](const auto& hook) { return hook->is_native(); };
  if (std::any_of(hooks->begin(), hooks->end(), is_native)) {
    return run_autograd_hooks(hooks, kind, {value}, {})[0];
  }
  py::gil_scoped_acquire gil;
  py::object current = wrapped(value);
  bool changed = false;
  for (const auto& hook : *hooks) {
    PyObject* const argument = current.ptr();
    auto result = called(*hook, &argument, 1);
    if (!result.is_none() && !result.is(current)) {
      checked(result, THPVariable_Unpack(current.ptr()), *hook, kind, 0, 1);
      current = std::move(result);
      changed = true;
    }
  }
  return changed ? THPVariable_Unpack(current.ptr()) : value;
}

Registered register_tensor_hook(const py::object& tensor,
                                std::shared_ptr<const AutogradHook> hook) {
  const auto variable = tensor.cast<at::Tensor>();
  TORCH_CHECK(variable.requires_grad(),
              "register_hook: tensor must require grad, got one that does not");
  const size_t output = variable.output_nr();
  const auto fits = [&](const TensorHooks& ours) { return ours.output() == output; };
  const auto& node = variable.grad_fn();
  if (!node && tensor.attr("_backward_hooks").is_none()) {
    // PyTorch's first registration drops all other hooks of a leaf; this is one.
    tensor.attr("_backward_hooks") = py::module_::import("collections").attr("OrderedDict")();
  }
  auto list = find<TensorHooks>(
      node ? node->tensor_pre_hooks() : torch::autograd::impl::hooks(variable), fits);
  if (!list) {
    list = std::make_shared<HookList>(HookKind::kTensor);
    auto held = std::make_unique<TensorHooks>(list, output);
    if (node) {
      node->add_tensor_pre_hook(std::move(held));
    } else {
      torch::autograd::impl::hooks(variable).push_back(std::move(held));
    }
  }
  return added(list, std::move(hook));
}

Registered register_node_hook(const py::object& node, HookKind kind,
                              std::shared_ptr<const AutogradHook> hook) {
  const auto found = node_of(node);
  TORCH_CHECK_TYPE(found, "node must be a torch.autograd.graph.Node, got ", type_name(node));
  const auto any = [](const auto&) { return true; };
  std::shared_ptr<HookList> list;
  if (kind == HookKind::kPre) {
    list = find<PreHooks>(found->pre_hooks(), any);
    if (!list) {
      list = std::make_shared<HookList>(kind);
      found->add_pre_hook(std::make_unique<PreHooks>(list));
    }
  } else {
    list = find<PostHooks>(found->post_hooks(), any);
    if (!list) {
      list = std::make_shared<HookList>(kind);
      found->add_post_hook(std::make_unique<PostHooks>(list));
    }
  }
  return added(list, std::move(hook));
}

}  // namespace commhook
