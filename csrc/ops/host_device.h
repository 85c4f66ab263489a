// Marks arithmetic that CPU kernels and CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define COMMHOOK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define COMMHOOK_HOST_DEVICE inline __attribute__((always_inline))
#endif
