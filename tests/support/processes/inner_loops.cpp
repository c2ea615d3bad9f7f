// The matrix products of the kernels in the three ways in which they read memory, for `inner_loops.py`: of fp32, or of bf16 if
// Arm's instructions for it are enabled.

#include "products_bf16.hpp"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
typedef InPairs<float>::Product Of;
typedef Bf16 Left;
typedef Pair Right;  // two rows woven into one
#else
typedef Product<float> Of;
typedef float Left, Right;
#endif

extern "C" void scores(int count, int depth, const Left *keys, int64_t row, const Right *queries, float *to) {
    product<REPLACE>(count, BLOCK, depth, Of{keys, row, Of::STEP, queries, BLOCK, to, BLOCK, nullptr});
}

extern "C" void values(
    int count, int width, const Left *weights, const Right *from, int64_t row, float *to, const float *factor) {
    const int64_t depth = Of::STEP * BLOCK;
    product<SCALE_AND_ADD>(BLOCK, width, count, Of{weights, Of::STEP, depth, from, row, to, width, factor});
}

extern "C" void gradients(int count, int width, const Left *weights, const Right *queries, int64_t row, float *to) {
    product<ADD>(count, width, BLOCK, Of{weights, BLOCK, Of::STEP, queries, row, to, row, nullptr});
}
