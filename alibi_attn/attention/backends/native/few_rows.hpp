// Products of a few rows with the rows of a weight matrix: the weights are read once, with the sums of all rows in registers.

#pragma once

#include "decoding.hpp"

enum {
    MOST_ROWS = 4,
    WIDE = 64,  // outputs of a block
};

// totals[r] = x[r] . weight, over `inputs` numbers. Weights of consecutive outputs form a single stream of memory, which
// determines the speed.
template <int rows, typename Stored>
INLINE void products_of(const Stored *weight, const float *x, int64_t inputs, float *totals) {
    constexpr int parts = rows == 1 ? 4 : 2, step = parts * VL<float>;
    Reals<float> sum[rows][parts];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int part = 0; part < parts; part++) sum[r][part] = Reals<float>{};
    int64_t i = 0;
    for (; i + step <= inputs; i += step)
        UNROLL for (int part = 0; part < parts; part++) {
            const Reals<float> w = load_floats(weight + i + part * VL<float>);
            UNROLL for (int r = 0; r < rows; r++) sum[r][part] += w * load(x + r * inputs + i + part * VL<float>);
        }
    UNROLL for (int r = 0; r < rows; r++) {
        Reals<float> all = sum[r][0];
        UNROLL for (int part = 1; part < parts; part++) all += sum[r][part];
        totals[r] = sum_of(all);
        for (int64_t last = i; last < inputs; last++) totals[r] += as_float(weight[last]) * x[r * inputs + last];
    }
}

// totals[r][o] = x[r] . weight[o] for a block of at most WIDE outputs.
template <int rows, typename Stored>
void products_of_block(const Stored *weight, const float *x, int64_t inputs, int64_t outputs, float (*totals)[WIDE]) {
    for (int64_t o = 0; o < outputs; o++) {
        float of_rows[rows];
        products_of<rows>(weight + o * inputs, x, inputs, of_rows);
        for (int r = 0; r < rows; r++) totals[r][o] = of_rows[r];
    }
}

template <typename Stored>
void products_of_block(
    int rows, const Stored *weight, const float *x, int64_t inputs, int64_t outputs, float (*totals)[WIDE]) {
    switch (rows) {
        case 1: return products_of_block<1>(weight, x, inputs, outputs, totals);
        case 2: return products_of_block<2>(weight, x, inputs, outputs, totals);
        case 3: return products_of_block<3>(weight, x, inputs, outputs, totals);
        default: return products_of_block<MOST_ROWS>(weight, x, inputs, outputs, totals);
    }
}

// Compiled once, in `linear.cpp`.
extern template void products_of_block(int, const float *, const float *, int64_t, int64_t, float (*)[WIDE]);
extern template void products_of_block(int, const BFloat16 *, const float *, int64_t, int64_t, float (*)[WIDE]);
extern template void products_of_block(int, const Float16 *, const float *, int64_t, int64_t, float (*)[WIDE]);
