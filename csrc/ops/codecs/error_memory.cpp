#include "ops/codecs/error_memory.h"

#include "ops/codecs/error_math.h"
#include "ops/cpu/capability.h"

namespace commhook::codecs {
namespace {

struct Conversions {
  void (*widen)(const uint16_t* from, int64_t n, float* values);
  void (*narrow)(const float* values, int64_t n, uint16_t* to);
  // place: the place of the first value.
  void (*narrow_at_random)(const float* values, int64_t n, uint32_t place, uint32_t key,
                           uint16_t* to);
};

#define COMMHOOK_KERNELS "ops/codecs/error_memory_kernels.inl"
#include "ops/cpu/for_each_instruction_set.h"

}  // namespace

ErrorMemory::ErrorMemory(const std::optional<at::Tensor>& error, const Rounding& rounding)
    : is_random_(rounding.is_random),
      key_(noise_key(rounding.seed0, rounding.seed1, rounding.step)) {
  if (!codecs::is_there(error)) {
    return;
  }
  if (error->scalar_type() == at::kFloat) {
    values_ = error->mutable_data_ptr<float>();
  } else {
    halves_ = static_cast<uint16_t*>(error->mutable_data_ptr());
  }
}

void ErrorMemory::read(int64_t begin, int64_t n, float* values) const {
  COMMHOOK_CHOOSE(kConversions).widen(halves_ + begin, n, values);
}

void ErrorMemory::write(int64_t begin, int64_t n, const float* values) const {
  const Conversions& conversions = COMMHOOK_CHOOSE(kConversions);
  if (is_random_) {
    conversions.narrow_at_random(values, n, static_cast<uint32_t>(begin), key_, halves_ + begin);
  } else {
    conversions.narrow(values, n, halves_ + begin);
  }
}

}  // namespace commhook::codecs
