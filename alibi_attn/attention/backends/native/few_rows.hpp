// Products of a few rows with the rows of a weight matrix: the weights are read once, with the sums of all rows in registers.

#pragma once

#include "decoding.hpp"

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
