// The arguments of `decoding.cpp` and `linear.cpp`, as `decoding.py` lays them out, and their common functions.

#pragma once

#include <cmath>
#include <cstdint>

#include "call.hpp"
#include "stored.hpp"
#include "vectors.hpp"

// The sum of the lanes of a vector, by halves: lane by lane it would cost more than the products of a short row.
template <int lanes, typename Vector>
INLINE float sum_of_lanes(Vector x) {
    if constexpr (lanes == 4) {
        return (x[0] + x[1]) + (x[2] + x[3]);
    } else {
        typedef float Half __attribute__((vector_size(2 * lanes)));
#if defined(__clang__) || __GNUC__ >= 12
        if constexpr (lanes == 16)
            return sum_of_lanes<8, Half>(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7)
                                         + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
        else
            return sum_of_lanes<4, Half>(__builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7));
#else
        Half halves[2];
        std::memcpy(halves, &x, sizeof halves);
        return sum_of_lanes<lanes / 2, Half>(halves[0] + halves[1]);
#endif
    }
}

INLINE float sum_of(Reals<float> x) { return sum_of_lanes<VL<float>>(x); }

// An upper bound of the norm of a row; see `norms.norm_bound`. Not finite if a number is not.
template <typename Stored>
double norm_of_stored(const Stored *row, int64_t D) {
    Reals<float> sum = {};
    for (int64_t d = 0; d < D; d += VL<float>) sum += load_floats(row + d) * load_floats(row + d);
    const double squares = sum_of(sum);
    return std::sqrt(squares) * (1 + (D + NORM_UNITS) * double(UNIT<float>)) + std::sqrt(double(D)) * VANISHING<float>;
}

// Shapes by the letters of `spec.py`. The queries are the last T of the S positions.
template <typename Stored>
struct DecodingCall {
    int64_t B, H, K, T, S, D;
    Rows<const Stored> query, key, value;
    Rows<Stored> output;
    const float *slopes;                          // [B, H]
    const int64_t *start, *stop;                  // [B]: the visible keys
    int64_t N, norms_of_head, norms_of_sequence;  // whole tiles with known norms, and the strides of the norms
    const double *key_norms, *value_norms;        // [B, K, N]
    int64_t window;                               // 0 = none
    double scale, tolerance;
    int64_t threads;
    int64_t *fine;  // whether the whole output is finite; if not, the caller uses another path

    const double *norms(const double *of, int64_t b, int64_t k) const { return of + b * norms_of_sequence + k * norms_of_head; }
};

template <typename Stored>
struct NormsCall {
    int64_t B, K, N, D;
    Rows<const Stored> rows;
    double *norms;  // [B, K, N]
    int64_t threads;
};

template <typename Stored>
struct LinearCall {
    int64_t rows, inputs, outputs, threads;
    const Stored *x, *weight, *bias;  // [rows, inputs], [outputs, inputs], [outputs] or null
    Stored *y;                        // [rows, outputs]
};
