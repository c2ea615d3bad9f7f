// Calls of `decoding.cpp` and `linear.cpp` as `decoding.py` lays them out, and what both do with a vector.

#pragma once

#include <cmath>
#include <cstdint>

#include "call.hpp"
#include "stored.hpp"
#include "vectors.hpp"

// By halves, each a vector of its own: lane by lane it takes longer than the products of a short row.
INLINE float sum_of(Reals<float> x) {
    typedef float Four __attribute__((vector_size(16)));
#if defined(__AVX512F__)
    typedef float Eight __attribute__((vector_size(32)));
    const Eight low = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7);
    const Eight high = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15), y = low + high;
    const Four z = __builtin_shufflevector(y, y, 0, 1, 2, 3) + __builtin_shufflevector(y, y, 4, 5, 6, 7);
#elif defined(__AVX2__)
    const Four z = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
    const Four z = x;
#endif
    return (z[0] + z[1]) + (z[2] + z[3]);
}

// An upper bound of the norm of a row; see `norms.norm_bound`. Not finite where a number is not.
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
    const int64_t *start, *stop;                  // [B]: the keys that may be seen
    int64_t N, norms_of_head, norms_of_sequence;  // whole tiles whose norms are known, and the strides of these
    const double *key_norms, *value_norms;        // [B, K, N]
    int64_t window;                               // 0 = none
    double scale, tolerance;
    int64_t threads;
    int64_t *fine;  // whether all that came out is finite; if not, somebody else must say what it is

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
