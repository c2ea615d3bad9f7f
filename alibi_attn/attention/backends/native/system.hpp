// What a library exports, and memory that is aligned, on every system.

#pragma once

#include <cstdint>
#include <cstdlib>

// Which part of the kernels a library has, by the numbers of `build.PARTS`; 0: all of them, as in a wheel.
#ifndef ALIBI_PART
#define ALIBI_PART 0
#endif
#define ALIBI_FLOAT32 (ALIBI_PART != 64)
#define ALIBI_FLOAT64 (ALIBI_PART == 0 || ALIBI_PART == 64)
#define ALIBI_BF16_PRODUCTS (ALIBI_PART == 0 || ALIBI_PART == 16)

#ifdef _WIN32
#include <malloc.h>
#define EXPORT extern "C" __attribute__((dllexport))
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

enum { LINE = 64 };  // bytes

// Uninitialized memory that starts at a multiple of `alignment` bytes; free it with `release`.
template <typename Number>
Number *allocate(int64_t numbers, size_t alignment = LINE) {
    const size_t bytes = size_t(numbers) * sizeof(Number);
#ifdef _WIN32
    return static_cast<Number *>(_aligned_malloc(bytes, alignment));
#else
    void *memory = nullptr;
    return posix_memalign(&memory, alignment, bytes) == 0 ? static_cast<Number *>(memory) : nullptr;
#endif
}

inline void release(void *memory) {
#ifdef _WIN32
    _aligned_free(memory);
#else
    std::free(memory);
#endif
}
