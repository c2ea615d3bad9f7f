// The arguments of a call, as `build.py` lays them out, and the record of the keys that forward visited.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "constants.hpp"

typedef uint16_t Bf16;

// [sequences, heads, rows, D]; strides in numbers, of every axis but the last, whose stride is 1.
template <typename Number>
struct Rows {
    Number *at;
    int64_t sequence, head, row;

    Number *of(int64_t b, int64_t h, int64_t i) const { return at + b * sequence + h * head + i * row; }
};

// Shapes use the letters of `spec.py`; N = T / BLOCK, rounded up. Pointers are not null unless stated.
template <typename Real>
struct Call {
    int64_t B, H, K, T, S, D;
    Rows<const Real> query, key, value, grad;
    Rows<Real> output, query_grad, key_grad, value_grad;
    const Real *slopes, *right_slopes;             // [B, H]
    const int64_t *first;                          // [B]: position of query 0
    const uint8_t *key_mask;                       // [B, S], or null
    const int32_t *query_segments, *key_segments;  // [B, T], [B, S], or null
    const double *key_bias;                        // [B, H, S], or null; -inf = may not be seen
    const int64_t *dropout_seed;                   // [R, 4] as in `spec.py`, or null: nothing is dropped
    const int64_t *query_numbers, *key_numbers;    // [B, T], [B, S] as in `spec.py`, or null
    double *lse;                                   // [B, H, T]: the result
    Real *rows;                                    // [B, 2, H, T]: m_i and ln l_i, written by forward; see `bias_origin`
    const Real *grad_lse;                          // [B, H, T], or null
    double *slope_grads;                           // [2, B, H], or null: for the slopes and the right slopes
    double *key_bias_grad, *query_bias_grad;       // [B, H, S], [B, H, T]: sums of ds over queries, over keys; or null
    int32_t *visited;                              // the keys that forward visited, see `Visited`
    const double *query_points, *key_points;       // [B, T, 3], [B, S, 3] in space, or null; |p_i - p_j| replaces |i - j|
    const Real *table;                             // [H, distances]: by i - j from `table_first` on, or null; then slopes are 0
    double *table_grads;                           // [H, distances], or null
    int64_t window, causal, has_values;            // window 0 = none; without values all count as equally long
    double scale, tolerance;
    int64_t threads, dropout_runs, dropout_threshold;  // R, and the bound below which a uint32 drops a weight
    double dropout_factor;                             // for the other weights
    int64_t distances, table_first;
    int64_t for_backward;  // whether a backward pass follows: forward then measures what it must visit
    int64_t bf16;  // query, key, value, grad and output are bf16 in a Call<float>, with strides in bf16 numbers

    int64_t blocks() const { return (T + BLOCK - 1) / BLOCK; }
    Real *row_max(int64_t b, int64_t h) const { return rows + (2 * b * H + h) * T; }
    Real *row_log_sum(int64_t b, int64_t h) const { return rows + ((2 * b + 1) * H + h) * T; }
};

// The band of a block of queries, keys [first, end), and the interval [low, high) of keys that masks allow.
struct KeyRange {
    int32_t first, end, low, high;
};

// The part of a band that backward visits; `measured.hpp`.
struct KeptBand {
    int32_t first, end;
};

// The keys that forward visited and those that backward visits, per sequence: H N ranges, H N outlier bits, H N kept bands,
// H N kept outlier bits, and K OUTLIER_TILES tiles.
template <typename Real>
struct Visited {
    const Call<Real> &call;

    int32_t *of(int64_t b) const { return call.visited + b * (8 * call.H * call.blocks() + call.K * OUTLIER_TILES); }
    KeyRange *ranges(int64_t b, int64_t h) const { return reinterpret_cast<KeyRange *>(of(b)) + h * call.blocks(); }
    // Which outlier tiles are visited outside the band.
    int32_t *outlier_bits(int64_t b, int64_t h) const { return of(b) + (4 * call.H + h) * call.blocks(); }
    KeptBand *kept_bands(int64_t b, int64_t h) const {
        return reinterpret_cast<KeptBand *>(of(b) + 5 * call.H * call.blocks()) + h * call.blocks();
    }
    int32_t *kept_outlier_bits(int64_t b, int64_t h) const { return of(b) + (7 * call.H + h) * call.blocks(); }
    // The tiles with the largest norms of keys, -1 = none.
    int32_t *outlier_tiles(int64_t b, int64_t k) const { return of(b) + 8 * call.H * call.blocks() + k * OUTLIER_TILES; }
};

// Whether query i of a head may see key j.
template <typename Real>
bool sees(const Call<Real> &call, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t distance = call.first[b] + i - j;
    if (distance < 0 && (call.causal || std::isinf(call.right_slopes[b * call.H + h]))) return false;
    if (call.window && std::abs(distance) >= call.window) return false;
    if (call.key_mask && !call.key_mask[b * call.S + j]) return false;
    if (call.key_bias && call.key_bias[(b * call.H + h) * call.S + j] == -INFINITY) return false;
    return !call.query_segments || call.query_segments[b * call.T + i] == call.key_segments[b * call.S + j];
}
