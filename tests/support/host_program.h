// Shared by the programs that run the index arithmetic of CUDA kernels on the host: random cases,
// and an exit at the first difference. tests/support/cpp_compiler.py compiles and runs them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>

inline std::mt19937_64 generator(0);

inline int64_t below(int64_t n) {
  return static_cast<int64_t>(generator() % static_cast<uint64_t>(n));
}

template <typename... Parts>
[[noreturn]] void fail(int line, const char* condition, const Parts&... parts) {
  std::cout << "line " << line << ": " << condition << " does not hold:";
  ((std::cout << ' ' << parts), ...);
  std::cout << std::endl;
  std::exit(1);
}

#define EXPECT(condition, ...)                 \
  do {                                         \
    if (!(condition)) {                        \
      fail(__LINE__, #condition, __VA_ARGS__); \
    }                                          \
  } while (0)
