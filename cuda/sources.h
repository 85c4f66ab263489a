// Prepares tensors for the launchers.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "ops/codecs/codec_checks.h"
#include "tensor_table.h"

namespace commhook::cuda {

inline Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return Dtype::kDouble;
    case at::kFloat:
      return Dtype::kFloat;
    case at::kHalf:
      return Dtype::kHalf;
    default:
      return Dtype::kBFloat16;  // the checks refuse all others
  }
}

// A GPU cannot load an element from an address that is not a multiple of its size. The error would
// make the device useless for the whole program. Only foreign memory can be misaligned.
inline void check_aligned(const char* op, const char* argument, int64_t index,
                          const at::Tensor& tensor) {
  const auto size = static_cast<std::uintptr_t>(tensor.element_size());
  const auto past = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % size;
  TORCH_CHECK_VALUE(past == 0, op, ": ", argument,
                    index < 0 ? std::string() : c10::str("[", index, "]"),
                    " must begin at an address that is a multiple of its element size, ", size,
                    ", got one ", past, " bytes past such");
}

// The int64 values of an optional argument; null if there is none.
inline const int64_t* numbers_of(const char* op, const char* argument,
                                 const std::optional<at::Tensor>& tensor) {
  if (!codecs::is_there(tensor)) {
    return nullptr;
  }
  check_aligned(op, argument, -1, *tensor);
  return tensor->const_data_ptr<int64_t>();
}

// Calls visit(tensor) for each tensor that holds elements.
template <typename Visit>
void visit_tensors(const char* op, at::TensorList tensors, const Visit& visit) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].numel() > 0) {
      check_aligned(op, "tensors", static_cast<int64_t>(i), tensors[i]);
      visit(tensors[i]);
    }
  }
}

// Tensors to read. A tensor that is not contiguous is read through a contiguous copy, in one more
// pass over memory. A kernel that follows strides would be slow for all tensors. In a bucket's own
// layout, parameters of permuted memory, such as channels_last, are contiguous views.
class Sources {
 public:
  Sources(const char* op, at::TensorList tensors) {
    segments_.reserve(tensors.size());
    visit_tensors(op, tensors, [this](const at::Tensor& tensor) {
      const void* data = nullptr;
      if (tensor.is_contiguous()) {
        data = tensor.const_data_ptr();
      } else {
        copies_.push_back(tensor.detach().contiguous());
        data = copies_.back().const_data_ptr();
      }
      segments_.push_back({data, tensor.numel(), dtype_of(tensor)});
    });
  }

  c10::ArrayRef<Segment<const void>> segments() const { return segments_; }

 private:
  std::vector<Segment<const void>> segments_;
  std::vector<at::Tensor> copies_;
};

// Tensors to write. A tensor that is not contiguous is written through a contiguous one (see
// Sources); finish() then copies that back.
class Destinations {
 public:
  Destinations(const char* op, at::TensorList tensors) {
    segments_.reserve(tensors.size());
    visit_tensors(op, tensors, [this](const at::Tensor& tensor) {
      void* data = nullptr;
      if (tensor.is_contiguous()) {
        data = tensor.mutable_data_ptr();
      } else {
        auto piece = at::empty(tensor.sizes(), tensor.options());
        data = piece.mutable_data_ptr();
        copies_.emplace_back(tensor, std::move(piece));
      }
      segments_.push_back({data, tensor.numel(), dtype_of(tensor)});
    });
  }

  c10::ArrayRef<Segment<void>> segments() const { return segments_; }

  void finish() const {
    for (const auto& [tensor, piece] : copies_) {
      tensor.detach().copy_(piece);
    }
  }

 private:
  std::vector<Segment<void>> segments_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

}  // namespace commhook::cuda
