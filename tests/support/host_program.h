// Shared by the programs that run the index arithmetic of CUDA kernels on the host: random cases,
// and an exit at the first difference. tests/support/cpp_compiler.py compiles and runs them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

inline std::mt19937_64 generator(0);

inline int64_t below(int64_t n) {
  return static_cast<int64_t>(generator() % static_cast<uint64_t>(n));
}

#define EXPECT(condition, ...)                                          \
  do {                                                                  \
    if (!(condition)) {                                                 \
      std::printf("line %d: %s does not hold: ", __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                         \
      std::printf("\n");                                                \
      std::exit(1);                                                     \
    }                                                                   \
  } while (0)
