#include "ops/memory_overlap.h"

#include <algorithm>
#include <numeric>

namespace commhook {
namespace {

// A dimension of more than one element, in bytes.
struct Dim {
  int64_t stride;
  int64_t size;
};

std::vector<Dim> dims_of(const at::Tensor& tensor) {
  std::vector<Dim> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) {
      dims.push_back({tensor.stride(d) * tensor.element_size(), tensor.size(d)});
    }
  }
  return dims;
}

// The bytes that a tensor spans, without the dimensions that step by multiples of `period`.
int64_t span_within(const std::vector<Dim>& dims, int64_t item, int64_t period) {
  int64_t span = item;
  for (const auto& dim : dims) {
    span += dim.stride % period == 0 ? 0 : (dim.size - 1) * dim.stride;
  }
  return span;
}

// A quick test that proves that two tensors do not overlap: modulo one of their strides, or the
// divisor of all strides, they occupy disjoint intervals. This covers tensors of every n-th element
// of one memory, and columns of a matrix.
bool surely_apart(const at::Tensor& a, const at::Tensor& b, int64_t distance) {
  const auto a_dims = dims_of(a);
  const auto b_dims = dims_of(b);
  std::vector<int64_t> periods{0};
  for (const auto* dims : {&a_dims, &b_dims}) {
    for (const auto& dim : *dims) {
      periods[0] = std::gcd(periods[0], dim.stride);
      periods.push_back(dim.stride);
    }
  }
  return std::any_of(periods.begin(), periods.end(), [&](int64_t period) {
    if (period == 0) {
      return false;
    }
    const int64_t start = ((distance % period) + period) % period;
    return start >= span_within(a_dims, a.element_size(), period) &&
           start + span_within(b_dims, b.element_size(), period) <= period;
  });
}

// Marks the cells of memory that tensors reach; detects a cell that is reached twice.
class Cells {
 public:
  Cells(const Extent& whole, const std::vector<const at::Tensor*>& tensors) : begin_(whole.begin) {
    for (const auto* tensor : tensors) {
      granule_ = std::gcd(granule_, static_cast<int64_t>(tensor->element_size()));
      granule_ = std::gcd(granule_, start_of(*tensor));
    }
    marked_.resize((static_cast<int64_t>(whole.end - whole.begin) + granule_ - 1) / granule_);
  }

  // Returns false if the tensor reaches a marked cell.
  bool mark(const at::Tensor& tensor) {
    return mark(dims_of(tensor), 0, start_of(tensor), tensor.element_size());
  }

 private:
  int64_t start_of(const at::Tensor& tensor) const {
    return static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) - begin_);
  }

  bool mark(const std::vector<Dim>& dims, size_t d, int64_t start, int64_t item) {
    if (d < dims.size()) {
      for (int64_t i = 0; i < dims[d].size; ++i) {
        if (!mark(dims, d + 1, start + i * dims[d].stride, item)) {
          return false;
        }
      }
      return true;
    }
    for (int64_t cell = start / granule_; cell < (start + item) / granule_; ++cell) {
      if (marked_[cell]) {
        return false;
      }
      marked_[cell] = true;
    }
    return true;
  }

  std::uintptr_t begin_;
  int64_t granule_ = 0;
  std::vector<bool> marked_;
};

bool share_a_cell(const at::Tensor& a, const at::Tensor& b, const Extent& whole) {
  Cells cells(whole, {&a, &b});
  cells.mark(a);
  return !cells.mark(b);
}

using Pair = std::optional<std::pair<int64_t, int64_t>>;

// Searches among tensors with a chain of overlapping extents.
Pair find_overlap_in(const std::vector<Extent>& chain, const Extent& whole,
                     at::TensorList tensors) {
  // Comparing all pairs pays only for a few tensors.
  constexpr size_t kFew = 16;
  bool undecided = chain.size() > kFew;
  for (size_t i = 0; i < chain.size() && !undecided; ++i) {
    for (size_t j = i + 1; j < chain.size() && !undecided; ++j) {
      undecided = overlap(chain[i], chain[j]) &&
                  !surely_apart(tensors[chain[i].index], tensors[chain[j].index],
                                static_cast<int64_t>(chain[j].begin - chain[i].begin));
    }
  }
  if (!undecided) {
    return std::nullopt;
  }
  std::vector<const at::Tensor*> members;
  members.reserve(chain.size());
  for (const auto& extent : chain) {
    members.push_back(&tensors[extent.index]);
  }
  Cells cells(whole, members);
  for (size_t j = 0; j < chain.size(); ++j) {
    if (cells.mark(*members[j])) {
      continue;
    }
    for (size_t i = 0; i < j; ++i) {
      if (share_a_cell(*members[i], *members[j], whole)) {
        return std::minmax(chain[i].index, chain[j].index);
      }
    }
  }
  return std::nullopt;
}

}  // namespace

int64_t span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || tensor.is_contiguous()) {
    return tensor.numel();
  }
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return last + 1;
}

Extent extent_of(const at::Tensor& tensor, int64_t index) {
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const auto bytes = static_cast<std::uintptr_t>(span_of(tensor) * tensor.element_size());
  return {begin, begin + bytes, index};
}

bool overlap(const Extent& a, const Extent& b) {
  return a.begin < b.end && b.begin < a.end && a.begin != a.end && b.begin != b.end;
}

bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.numel() <= 1 || tensor.is_non_overlapping_and_dense()) {
    return false;
  }
  // Sorts by stride. Each dimension must step over everything that the smaller strides reach.
  auto dims = dims_of(tensor);
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) {
    return std::pair(a.stride, a.size) < std::pair(b.stride, b.size);
  });
  int64_t reach = 0;  // the largest offset that the smaller strides reach
  for (const auto& dim : dims) {
    if (dim.stride <= reach) {
      return true;
    }
    reach += (dim.size - 1) * dim.stride;
  }
  return false;
}

Pair find_overlap(at::TensorList tensors, std::vector<Extent> extents) {
  const auto is_empty = [](const Extent& extent) { return extent.begin == extent.end; };
  extents.erase(std::remove_if(extents.begin(), extents.end(), is_empty), extents.end());
  const auto before = [](const Extent& a, const Extent& b) { return a.begin < b.begin; };
  if (!std::is_sorted(extents.begin(), extents.end(), before)) {
    std::sort(extents.begin(), extents.end(), before);
  }
  for (size_t i = 0; i < extents.size();) {
    Extent whole = extents[i];
    size_t end = i + 1;
    for (; end < extents.size() && extents[end].begin < whole.end; ++end) {
      whole.end = std::max(whole.end, extents[end].end);
    }
    if (end > i + 1) {
      const auto pair =
          find_overlap_in({extents.begin() + i, extents.begin() + end}, whole, tensors);
      if (pair) {
        return pair;
      }
    }
    i = end;
  }
  return std::nullopt;
}

}  // namespace commhook
