// Compiles a file of kernels once for each instruction set. A source file includes this once, in an
// anonymous namespace, with COMMHOOK_KERNELS as the name of that file. The file's contents are then
// in the namespaces kernels_default, kernels_avx2 and kernels_avx512. The file may include only
// other files of kernels. A template of the standard library would be compiled for that instruction
// set, and could then be linked into code for other processors. The file can use the headers of the
// including source file, which must include cpu/capability.h.
//   COMMHOOK_CHOOSE(name)   kernels_...::name, for the instruction set that capability() returns
//   COMMHOOK_VECTOR_BYTES   in the file of kernels: 16, with AVX2 32, with AVX-512 64; GCC 12 does
//                           not define __AVX512F__ there

#define COMMHOOK_VECTOR_BYTES 16
namespace kernels_default {
#include COMMHOOK_KERNELS
}  // namespace kernels_default
#undef COMMHOOK_VECTOR_BYTES

#ifdef COMMHOOK_X86_KERNELS

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2,popcnt"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,popcnt")
#endif
#define COMMHOOK_VECTOR_BYTES 32
namespace kernels_avx2 {
#include COMMHOOK_KERNELS
}  // namespace kernels_avx2
#undef COMMHOOK_VECTOR_BYTES
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(                                                        \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,bmi2,popcnt," \
                          "prefer-vector-width=512"))),                              \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,bmi2,popcnt")
#pragma GCC target("prefer-vector-width=512")
#endif
#define COMMHOOK_VECTOR_BYTES 64
namespace kernels_avx512 {
#include COMMHOOK_KERNELS
}  // namespace kernels_avx512
#undef COMMHOOK_VECTOR_BYTES
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define COMMHOOK_CHOOSE(name)                                                 \
  (::commhook::cpu::capability() == ::commhook::cpu::Capability::kAvx512      \
       ? kernels_avx512::name                                                 \
       : (::commhook::cpu::capability() == ::commhook::cpu::Capability::kAvx2 \
              ? kernels_avx2::name                                            \
              : kernels_default::name))

#else
#define COMMHOOK_CHOOSE(name) kernels_default::name
#endif
