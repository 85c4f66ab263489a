#include "ops/cpu/segments.h"

#include <algorithm>
#include <cstring>

namespace commhook::cpu {
namespace {

// Visits `count` elements from the bucket position on, run by run of the innermost dimension:
// visit(data, stride, run), stride in elements.
template <typename Visit>
void for_each_run(const Segment& segment, int64_t position, int64_t count, const Visit& visit) {
  const int last = segment.dims - 1;
  // Computes the index of the first element; the loop advances it from there.
  int64_t rest = position - segment.begin;
  int64_t offset = 0;
  c10::SmallVector<int64_t, 8> index(segment.dims);
  for (int d = last; d >= 0; --d) {
    index[d] = rest % segment.shape[d];
    rest /= segment.shape[d];
    offset += index[d] * segment.stride[d];
  }
  while (count > 0) {
    const int64_t run = std::min(count, segment.shape[last] - index[last]);
    visit(segment.data + offset * segment.element_size, segment.stride[last], run);
    count -= run;
    offset += run * segment.stride[last];
    index[last] += run;
    for (int d = last; d > 0 && index[d] == segment.shape[d]; --d) {
      offset += segment.stride[d - 1] - segment.shape[d] * segment.stride[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

template <typename Word>
void gather_words(const Segment& segment, int64_t position, int64_t count, char* piece) {
  for_each_run(segment, position, count, [&](const char* data, int64_t stride, int64_t run) {
    if (stride == 1) {
      std::memcpy(piece, data, run * sizeof(Word));
    } else {
      const auto* from = reinterpret_cast<const Word*>(data);
      auto* to = reinterpret_cast<Word*>(piece);
      for (int64_t i = 0; i < run; ++i) {
        to[i] = from[i * stride];
      }
    }
    piece += run * sizeof(Word);
  });
}

template <typename Word>
void scatter_words(const Segment& segment, int64_t position, int64_t count, const char* piece) {
  for_each_run(segment, position, count, [&](char* data, int64_t stride, int64_t run) {
    if (stride == 1) {
      std::memcpy(data, piece, run * sizeof(Word));
    } else {
      const auto* from = reinterpret_cast<const Word*>(piece);
      auto* to = reinterpret_cast<Word*>(data);
      for (int64_t i = 0; i < run; ++i) {
        to[i * stride] = from[i];
      }
    }
    piece += run * sizeof(Word);
  });
}

}  // namespace

Segments::Segments(at::TensorList tensors) {
  segments_.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    const int64_t numel = tensor.numel();
    // Const access: destinations are written through the same pointer, so a lazily copied storage
    // must be their own by then. The operator ensures this by mutable access.
    Segment segment{static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())),
                    total_,
                    total_ + numel,
                    static_cast<int>(tensor.element_size()),
                    dtype_index(tensor.scalar_type()),
                    0,
                    0,
                    nullptr,
                    nullptr};
    if (numel > 1 && !tensor.is_contiguous()) {
      // Merges dimensions that are contiguous together, and drops those of size 1.
      const auto first = dimensions_.size();
      c10::SmallVector<std::pair<int64_t, int64_t>, 8> merged;  // shape, stride
      for (int64_t d = 0; d < tensor.dim(); ++d) {
        const int64_t size = tensor.size(d);
        const int64_t stride = tensor.stride(d);
        if (size == 1) {
          continue;
        }
        if (!merged.empty() && merged.back().second == size * stride) {
          merged.back() = {merged.back().first * size, stride};
        } else {
          merged.emplace_back(size, stride);
        }
      }
      for (const auto& dimension : merged) {
        dimensions_.push_back(dimension.first);
      }
      for (const auto& dimension : merged) {
        dimensions_.push_back(dimension.second);
      }
      segment.dims = static_cast<int>(merged.size());
      segment.first_dimension = first;
    }
    total_ += numel;
    segments_.push_back(segment);
  }
  for (auto& segment : segments_) {  // dimensions_ is complete and does not move any more
    segment.shape = dimensions_.data() + segment.first_dimension;
    segment.stride = segment.shape + segment.dims;
  }
}

size_t Segments::find(int64_t position) const {
  const auto found =
      std::upper_bound(segments_.begin(), segments_.end(), position,
                       [](int64_t p, const Segment& segment) { return p < segment.end; });
  return static_cast<size_t>(found - segments_.begin());
}

void gather(const Segment& segment, int64_t position, int64_t count, char* piece) {
  switch (segment.element_size) {
    case 2:
      return gather_words<uint16_t>(segment, position, count, piece);
    case 4:
      return gather_words<uint32_t>(segment, position, count, piece);
    default:
      return gather_words<uint64_t>(segment, position, count, piece);
  }
}

void scatter(const Segment& segment, int64_t position, int64_t count, const char* piece) {
  switch (segment.element_size) {
    case 2:
      return scatter_words<uint16_t>(segment, position, count, piece);
    case 4:
      return scatter_words<uint32_t>(segment, position, count, piece);
    default:
      return scatter_words<uint64_t>(segment, position, count, piece);
  }
}

}  // namespace commhook::cpu
