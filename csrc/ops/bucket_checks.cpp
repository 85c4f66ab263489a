#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "ops/autograd_checks.h"
#include "ops/bucket.h"
#include "ops/dtype_name.h"

namespace commhook {
namespace {

constexpr const char* kDtypes = "float64, float32, float16 or bfloat16";

void check_dense(const char* op, const char* argument, int64_t index, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), op, ": ", argument_name(argument, index),
              " must be a tensor, got None");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, op, ": ", argument_name(argument, index),
                   " must be dense (torch.strided), got layout ", tensor.layout());
  TORCH_CHECK_TYPE(is_bucket_dtype(tensor.scalar_type()), op, ": ", argument_name(argument, index),
                   " must be of dtype ", kDtypes, ", got ", dtype_name(tensor.scalar_type()));
}

// The bytes [begin, end) between a tensor's first and last element.
struct Extent {
  std::uintptr_t begin;
  std::uintptr_t end;
  int64_t index;
};

Extent extent_of(const at::Tensor& tensor, int64_t index) {
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0) {
    return {begin, begin, index};
  }
  int64_t last = tensor.numel() - 1;
  if (!tensor.is_contiguous()) {
    last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      last += (tensor.size(d) - 1) * tensor.stride(d);
    }
  }
  return {begin, begin + static_cast<std::uintptr_t>((last + 1) * tensor.element_size()), index};
}

bool overlap(const Extent& a, const Extent& b) {
  return a.begin < b.end && b.begin < a.end && a.begin != a.end && b.begin != b.end;
}

// Whether two indices of the tensor reach one element. Dimensions are taken by growing stride; each
// must step over all that lies below it.
bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.numel() <= 1 || tensor.is_non_overlapping_and_dense()) {
    return false;
  }
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) {
      dims.emplace_back(tensor.stride(d), tensor.size(d));
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // the largest offset that the smaller strides reach
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) {
      return true;
    }
    reach += (size - 1) * stride;
  }
  return false;
}

}  // namespace

int64_t total_numel(at::TensorList tensors) {
  int64_t total = 0;
  for (const auto& tensor : tensors) {
    total += tensor.numel();
  }
  return total;
}

void check_buffer_dtype(const char* op, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_TYPE(!dtype.has_value() || is_bucket_dtype(*dtype), op, ": dtype must be ", kDtypes,
                   ", got ", dtype_name(*dtype));
}

at::ScalarType check_flatten(const char* op, at::TensorList tensors,
                             std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_VALUE(!tensors.empty(), op, ": tensors must hold at least one tensor, got none");
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_dense(op, "tensors", static_cast<int64_t>(i), tensors[i]);
    TORCH_CHECK_VALUE(tensors[i].device() == tensors[0].device(), op, ": tensors[", i,
                      "] must be on the device of tensors[0], ", tensors[0].device(), ", got ",
                      tensors[i].device());
  }
  if (dtype.has_value()) {
    check_buffer_dtype(op, dtype);
    return *dtype;
  }
  for (size_t i = 1; i < tensors.size(); ++i) {
    TORCH_CHECK_TYPE(tensors[i].scalar_type() == tensors[0].scalar_type(), op,
                     ": dtype must be given where the tensors differ in theirs, got none for "
                     "tensors[0] of ",
                     dtype_name(tensors[0].scalar_type()), " and tensors[", i, "] of ",
                     dtype_name(tensors[i].scalar_type()));
  }
  return tensors[0].scalar_type();
}

void check_flatten_out(const char* op, at::TensorList tensors, const at::Tensor& out) {
  check_dense(op, "out", -1, out);
  TORCH_CHECK_VALUE(out.is_contiguous(), op, ": out must be contiguous, got sizes ", out.sizes(),
                    " with strides ", out.strides());
  const Extent destination = extent_of(out, -1);
  int64_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    check_dense(op, "tensors", index, tensors[i]);
    TORCH_CHECK_VALUE(tensors[i].device() == out.device(), op, ": tensors[", i,
                      "] must be on the device of out, ", out.device(), ", got ",
                      tensors[i].device());
    TORCH_CHECK_VALUE(!overlap(destination, extent_of(tensors[i], index)), op,
                      ": out must share no memory with the tensors, got one that overlaps tensors[",
                      i, "]");
    total += tensors[i].numel();
  }
  TORCH_CHECK_VALUE(out.numel() == total, op, ": out must hold ", total,
                    " elements, as many as the tensors, got ", out.numel());
}

void check_unflatten(const char* op, const at::Tensor& buffer, at::TensorList tensors,
                     const char* argument) {
  check_dense(op, "buffer", -1, buffer);
  TORCH_CHECK_VALUE(buffer.is_contiguous(), op, ": buffer must be contiguous, got sizes ",
                    buffer.sizes(), " with strides ", buffer.strides());
  int64_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_dense(op, argument, static_cast<int64_t>(i), tensors[i]);
    TORCH_CHECK_VALUE(tensors[i].device() == buffer.device(), op, ": ", argument, "[", i,
                      "] must be on the device of buffer, ", buffer.device(), ", got ",
                      tensors[i].device());
    total += tensors[i].numel();
  }
  TORCH_CHECK_VALUE(buffer.numel() == total, op, ": buffer must hold ", total,
                    " elements, as many as ", argument, ", got ", buffer.numel());
}

void check_unflatten_into(const char* op, const at::Tensor& buffer, at::TensorList tensors) {
  check_unflatten(op, buffer, tensors, "tensors");
  const Extent source = extent_of(buffer, -1);
  // Destinations in one dense piece each are compared by their extents. Strided ones may
  // interleave without harm, so only what is sure to collide is refused: their first and last
  // elements are compared with the dense ones, and the first ones with each other.
  std::vector<Extent> dense;
  std::vector<Extent> strided;
  dense.reserve(tensors.size());
  bool ascending = true;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    const Extent extent = extent_of(tensor, static_cast<int64_t>(i));
    TORCH_CHECK_VALUE(!overlap(source, extent), op, ": tensors[", i,
                      "] must share no memory with buffer, got one that overlaps it");
    const bool in_one_piece = tensor.is_non_overlapping_and_dense();
    TORCH_CHECK_VALUE(in_one_piece || !overlaps_itself(tensor), op, ": tensors[", i,
                      "] must reach each of its elements once, got sizes ", tensor.sizes(),
                      " with strides ", tensor.strides());
    if (in_one_piece && extent.begin != extent.end) {
      ascending = ascending && (dense.empty() || dense.back().begin <= extent.begin);
      dense.push_back(extent);
    } else if (!in_one_piece && extent.begin != extent.end) {
      strided.push_back(extent);
    }
  }
  const auto before = [](const Extent& a, const Extent& b) { return a.begin < b.begin; };
  const auto check_apart = [op](bool apart, const Extent& a, const Extent& b) {
    TORCH_CHECK_VALUE(apart, op, ": tensors must share no memory with each other, got tensors[",
                      std::max(a.index, b.index), "] and tensors[", std::min(a.index, b.index),
                      "] that overlap");
  };
  if (!ascending) {
    std::sort(dense.begin(), dense.end(), before);
  }
  for (size_t i = 1; i < dense.size(); ++i) {
    check_apart(dense[i - 1].end <= dense[i].begin, dense[i - 1], dense[i]);
  }
  std::sort(strided.begin(), strided.end(), before);
  for (size_t i = 0; i < strided.size(); ++i) {
    if (i > 0) {
      check_apart(strided[i - 1].begin != strided[i].begin, strided[i - 1], strided[i]);
    }
    for (const auto byte : {strided[i].begin, strided[i].end - 1}) {
      const auto next = std::upper_bound(dense.begin(), dense.end(), Extent{byte, byte, 0}, before);
      if (next != dense.begin()) {
        check_apart(byte >= (next - 1)->end, *(next - 1), strided[i]);
      }
    }
  }
}

}  // namespace commhook
