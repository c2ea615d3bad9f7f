// The matrix products of the kernels in the three ways in which they read memory, for `inner_loops.py`.

#include "call.hpp"
#include "vectors.hpp"

extern "C" void scores(int count, int depth, const float *keys, int64_t row, const float *queries, float *to) {
    product<REPLACE>(count, BLOCK, depth, Product<float>{keys, row, 1, queries, BLOCK, to, BLOCK, nullptr});
}

extern "C" void values(
    int count, int width, const float *weights, const float *from, int64_t row, float *to, const float *factor) {
    product<SCALE_AND_ADD>(BLOCK, width, count, Product<float>{weights, 1, BLOCK, from, row, to, width, factor});
}

extern "C" void gradients(int count, int width, const float *weights, const float *queries, int64_t row, float *to) {
    product<ADD>(count, width, BLOCK, Product<float>{weights, BLOCK, 1, queries, row, to, row, nullptr});
}
