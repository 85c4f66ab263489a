// The dtypes of buckets.
#pragma once

#include <c10/core/ScalarType.h>

namespace commhook {

// float64, float32, float16, bfloat16.
inline bool is_bucket_dtype(c10::ScalarType dtype) {
  return dtype == c10::kDouble || dtype == c10::kFloat || dtype == c10::kHalf ||
         dtype == c10::kBFloat16;
}

}  // namespace commhook
