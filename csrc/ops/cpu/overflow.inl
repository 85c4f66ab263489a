// The smallest magnitude that becomes an infinity in a cast from float32: halfway between the
// dtype's largest value and the next power of two (ties go to even, upwards here).
template <typename To>
inline float overflow() {
  return __builtin_inff();
}
template <>
inline float overflow<c10::Half>() {
  return 65520.0f;
}
template <>
inline float overflow<c10::BFloat16>() {
  return 0x1.ffp+127f;
}
