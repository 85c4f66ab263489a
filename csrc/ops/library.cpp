// Every operator of the library, by subject. The kernels register themselves where they stand:
// reference kernels (plain ATen, every device), CPU kernels in csrc/ops/cpu, CUDA kernels in cuda.
// The fakes stand beside the Python declarations, in the modules that are named here.
#include <torch/library.h>

namespace {

// at::Tag::out, which torch 2.11 does not have.
template <typename Tag>
constexpr auto out_tag(int) -> decltype(Tag::out) {
  return Tag::out;
}
template <typename Tag>
constexpr Tag out_tag(long) {  // NOLINT: the worse match
  return Tag::pt2_compliant_tag;
}

}  // namespace

TORCH_LIBRARY(commhook, m) {
  m.set_python_module("torch_commhook.native.bucket_ops");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // ---- Bucket: many tensors <-> one flat buffer, in logical (row-major) order. Values are scaled
  // ---- in float32 (float64 where either side is float64) before the cast.

  // One-dimensional concatenation. dtype defaults to that of the tensors.
  m.def("flatten(Tensor[] tensors, *, float scale=1.0, ScalarType? dtype=None) -> Tensor",
        compliant);
  // The same into a caller's contiguous buffer, whose dtype decides.
  m.def("flatten.out(Tensor[] tensors, *, float scale=1.0, Tensor(a!) out) -> Tensor(a!)",
        {at::Tag::pt2_compliant_tag, out_tag<at::Tag>(0)});
  // The same, with the sum of the squares of the scaled values (before the cast, accumulated in
  // float64) and the number of non-finite values in the buffer (int64), both 0-dimensional.
  m.def(
      "flatten_stats(Tensor[] tensors, *, float scale=1.0, ScalarType? dtype=None) -> "
      "(Tensor buffer, Tensor sum_of_squares, Tensor nonfinite_count)",
      compliant);
  // New tensors with the shapes, strides and dtypes of `like`, filled from the buffer.
  m.def("unflatten(Tensor buffer, Tensor[] like, *, float scale=1.0) -> Tensor[]", compliant);
  // The same into existing tensors.
  m.def("unflatten_into(Tensor buffer, Tensor(a!)[] tensors, *, float scale=1.0) -> ()", compliant);

  // ---- Build: what the library was compiled for and what it runs on.

  // The instruction set of the CPU kernels: reference, default, avx2 or avx512. With `limit`, the
  // kernels use at most that from here on (for tests and measurements).
  m.def("cpu_capability(str? limit=None) -> str");
  // The torch version that the library was built against.
  m.def("built_for_torch() -> str");
  // Whether CUDA kernels were compiled in.
  m.def("has_cuda_kernels() -> bool");
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.native.check_ops");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // ---- Checks of a hook. The first writes nothing and returns nothing: it is registered as
  // ---- effectful in torch_commhook/native/check_ops.py, or compilers would leave it out.

  // Raises where `result`, which the hook of that name gave for `value`, has another dtype, layout,
  // device or size.
  m.def("check_hook_result(Tensor result, Tensor value, str hook) -> ()", compliant);
  // Adds the number of infinities and NaNs in the tensors to `count`, one int64 on their device.
  m.def("check_finite(Tensor[] tensors, Tensor(a!) count) -> ()", compliant);
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.process_group.broadcast");

  // ---- Process groups, which are given by their names. The kernels stand in csrc/runtime.

  // Writes the contents that the tensors have on one rank into those of all ranks, in buckets of at
  // most so many bytes.
  m.def(
      "broadcast_coalesced(Tensor(a!)[] tensors, int buffer_size, int rank, str group_name) -> ()",
      {at::Tag::pt2_compliant_tag});
}
