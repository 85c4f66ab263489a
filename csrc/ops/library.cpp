// The operators on buckets, by subject; codecs, low_rank, symmetric and sum_rows declare their own.
// Kernels register themselves in their own files: reference kernels (plain ATen, every device) and
// CPU kernels in the folders of csrc/ops, CUDA kernels in cuda. The fakes are in the Python modules
// named here.
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

  // Concatenates into one dimension. dtype defaults to that of the tensors.
  m.def("flatten(Tensor[] tensors, *, float scale=1.0, ScalarType? dtype=None) -> Tensor",
        compliant);
  // The same into a caller's contiguous buffer, with its dtype.
  m.def("flatten.out(Tensor[] tensors, *, float scale=1.0, Tensor(a!) out) -> Tensor(a!)",
        {at::Tag::pt2_compliant_tag, out_tag<at::Tag>(0)});
  // The same; also returns the sum of the squares of the scaled values (before the cast, in
  // float64) and the number of non-finite values in the buffer (int64). Both are 0-dimensional.
  m.def(
      "flatten_stats(Tensor[] tensors, *, float scale=1.0, ScalarType? dtype=None) -> "
      "(Tensor buffer, Tensor sum_of_squares, Tensor nonfinite_count)",
      compliant);
  // Returns new tensors with the shapes, strides and dtypes of `like`, filled from the buffer.
  m.def("unflatten(Tensor buffer, Tensor[] like, *, float scale=1.0) -> Tensor[]", compliant);
  // The same into existing tensors.
  m.def("unflatten_into(Tensor buffer, Tensor(a!)[] tensors, *, float scale=1.0) -> ()", compliant);

  // ---- Build: the versions and features of the library.

  // The instruction set of the CPU kernels: reference, default, avx2 or avx512. With `limit`, the
  // kernels use at most that from then on (for tests and measurements).
  m.def("cpu_capability(str? limit=None) -> str");
  // The torch version that the library was built against.
  m.def("built_for_torch() -> str");
  // Whether CUDA kernels were compiled in.
  m.def("has_cuda_kernels() -> bool");
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.native.bucket_ops");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // ---- Checks of a hook. The first writes nothing and returns nothing: compilers would leave it
  // out, were it not registered as effectful in torch_commhook/native/bucket_ops.py.

  // Raises an error if `result`, which the named hook returned for `value`, differs in dtype,
  // layout, device or size.
  m.def("check_hook_result(Tensor result, Tensor value, str hook) -> ()", compliant);
  // Adds the number of infinities and NaNs in the tensors to `count`, one int64 on their device.
  m.def("check_finite(Tensor[] tensors, Tensor(a!) count) -> ()", compliant);
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.process_group.broadcast");

  // ---- Process groups, given by their names. The kernels are in csrc/runtime.

  // Copies one rank's tensors to all ranks, in buckets of at most `buffer_size` bytes.
  m.def(
      "broadcast_coalesced(Tensor(a!)[] tensors, int buffer_size, int rank, str group_name) -> ()",
      {at::Tag::pt2_compliant_tag});
}
