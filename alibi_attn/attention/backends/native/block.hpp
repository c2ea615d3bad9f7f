// A call, a block of queries in it, and the scores of the block with a few keys.
//
// Scores lie transposed, [keys][BLOCK]: the queries of a block are the lanes of the vectors, so a maximum or a sum over keys goes
// down a column, and keys and values are read where they lie.

#pragma once

#include <algorithm>
#include <cstdlib>

#include "vectors.hpp"

enum { BLOCK = 64, HALF = BLOCK / 2 };  // queries of a block, and keys met at a time; `bounds.TILE`

// [sequences, heads, rows, D]; strides in numbers, of every axis but the last, whose stride is 1.
template <typename Real>
struct Rows {
    const Real *at;
    int64_t sequence, head, row;

    const Real *of(int64_t b, int64_t h, int64_t i) const { return at + b * sequence + h * head + i * row; }
};

// As `backend.py` fills it. Shapes by the letters of `spec.py`; N = T / BLOCK rounded up; a mask may be null.
template <typename Real>
struct Call {
    int64_t B, H, K, T, S, D, P;
    Rows<Real> query, key, value, output, grad;
    const Real *slopes, *right_slopes;            // [B, H]
    const int64_t *first;                          // [B]: position of query 0
    const uint8_t *key_mask;                       // [B, S]
    const int32_t *query_segments, *key_segments;  // [B, T], [B, S]
    int32_t *ranges;    // [B, H, N, 4]: keys of the band that is met, which forward finds, and of all that masks allow
    int32_t *pins;      // [B, H, N]: which of the outlying tiles are met too, as bits; forward finds them
    int32_t *outliers;  // [B, K, P]: the tiles of keys that may be, -1 = none; forward finds them
    int64_t window, causal, has_values;  // window 0 = none
    double scale, tolerance;
    const int64_t *tasks;  // [count, ...], see forward.cpp and backward.cpp
    int64_t count, threads;
    Real *lse;                      // [B, H, T]
    Real *result;                   // [B, H, T, D]: the output, or the gradient of the queries
    const Real *grad_lse;           // [B, H, T], or null
    Real *key_grad, *value_grad;    // [B, K, S, D]
    Real *partial;                  // gradients of keys that are not a task's own
    const int64_t *order, *starts;   // [count], [B K + 1]
    double *slope_grads;             // [count, H / K, 2], or null: of the slopes, and of the right slopes
    int64_t *met;                    // [B, H], or null: the scores computed are added to it
    Real *norms, *stats;             // forward's own: [B, K, 2, padded S], [B, K, STATS], see certificate.hpp
};

// One block of queries of one head.
template <typename Real>
struct Block {
    const Call<Real> &call;
    Real *queries;  // [D][BLOCK], zeros beyond the last
    int64_t b = 0, h = 0, k = 0, n = 0;
    int64_t position = 0;  // of the first query
    int rows = 0;
    Real slope = 0, right_slope = 0;
    bool looks_right = false;
    int32_t *range = nullptr, *pins = nullptr;
    const int32_t *outliers = nullptr;

    void begin(int64_t sequence, int64_t head, int64_t block) {
        b = sequence, h = head, k = head / (call.H / call.K), n = block;
        const int64_t at = b * call.H + h;
        position = call.first[b] + n * BLOCK;
        rows = (int)std::min<int64_t>(BLOCK, call.T - n * BLOCK);
        slope = call.slopes[at], right_slope = call.right_slopes[at];
        looks_right = !call.causal && !std::isinf(right_slope);
        const int64_t place = at * ((call.T + BLOCK - 1) / BLOCK) + n;
        range = call.ranges + place * 4, pins = call.pins + place;
        outliers = call.outliers + (b * call.K + k) * call.P;
        transpose(call.query, queries);
    }

    int64_t row() const { return (b * call.H + h) * call.T + n * BLOCK; }

    // The block's rows as [D][BLOCK].
    void transpose(const Rows<Real> &from, Real *to) const {
        const Real *at = from.of(b, h, n * BLOCK);
        for (int64_t d = 0; d < call.D; d++) {
            for (int i = 0; i < rows; i++) to[d * BLOCK + i] = at[i * from.row + d];
            for (int i = rows; i < BLOCK; i++) to[d * BLOCK + i] = 0;
        }
    }

    // Whether the first of these keys stands where the first query does: then no query sees the keys after it, and the scores of
    // the first half of the queries with the second half of the keys need not be computed.
    bool is_triangle(int64_t key) const { return call.causal && key == position; }

    // products[j][i] = x_j . y_i for `count` keys (or values) x from `key` on, and y [D][BLOCK]; zeros in what is not computed.
    void inner_products(const Rows<Real> &from, int64_t key, int count, const Real *y, Real *products) const {
        Product<Real> p = {from.of(b, k, key), from.row, 1, y, BLOCK, products, BLOCK, nullptr};
        if (!is_triangle(key) || count <= HALF) return product<REPLACE>(count, BLOCK, (int)call.D, p);
        product<REPLACE>(HALF, BLOCK, (int)call.D, p);
        for (int j = HALF; j < count; j++) std::fill_n(products + j * BLOCK, +HALF, Real(0));
        p.a += HALF * p.a_row, p.b += HALF, p.c += HALF * BLOCK + HALF;
        product<REPLACE>(count - HALF, HALF, (int)call.D, p);
    }

    // to[i] = (factor[i]) to[i] + sum over the keys j of weights[j][i] x_j, for x from `key` on.
    template <Start start>
    void sum_over_keys(const Rows<Real> &from, int64_t key, int count, const Real *weights, Real *to, const Real *factor) const {
        Product<Real> p = {weights, 1, BLOCK, from.of(b, k, key), from.row, to, call.D, factor};
        if (!is_triangle(key) || count <= HALF || rows <= HALF) return product<start>(rows, (int)call.D, count, p);
        product<start>(HALF, (int)call.D, HALF, p);
        p.a += HALF, p.c += HALF * call.D;
        if (start == SCALE_AND_ADD) p.factor += HALF;
        product<start>(rows - HALF, (int)call.D, count, p);
    }

    // to[j] += sum over the queries i of weights[j][i] y_i.
    void sum_over_queries(const Rows<Real> &from, int64_t key, int count, const Real *weights, Real *to) const {
        Product<Real> p = {weights, BLOCK, 1, from.of(b, h, n * BLOCK), from.row, to, call.D, nullptr};
        if (!is_triangle(key) || count <= HALF || rows <= HALF) return product<ADD>(count, (int)call.D, rows, p);
        product<ADD>(HALF, (int)call.D, rows, p);
        p.a += HALF * BLOCK + HALF, p.b += HALF * p.b_depth, p.c += HALF * call.D;
        product<ADD>(count - HALF, (int)call.D, rows - HALF, p);
    }

    // Every pair in [key, key + count) is seen, and to the left.
    bool is_plain(int64_t key, int count) const {
        if (call.key_mask || call.key_segments || key + count - 1 > position) return false;
        return !call.window || position + rows - 1 - key < call.window;
    }

    // scores = scale scores - m |i - j|, or -inf where the query may not look.
    void add_bias(int64_t key, int count, Real *scores) const {
        const bool plain = is_plain(key, count);
        for (int j = 0; j < count; j++, scores += BLOCK) {
            if (plain)
                add_bias_to_left(position - key - j, scores);
            else
                add_bias_and_mask(key + j, scores);
        }
    }

    // i - j for VL queries, with the distance of query 0; in floats it is rounded beyond 2^24, as any number is.
    static Reals<Real> away(int lane, int64_t distance) {
        return __builtin_convertvector(lanes() + lane, Reals<Real>) + (Real)distance;
    }

    static Ints<Real> lanes() {
        Ints<Real> at;
        for (int i = 0; i < VL<Real>; i++) at[i] = i;
        return at;
    }

    void add_bias_to_left(int64_t distance, Real *scores) const {
        const Real scale = (Real)call.scale;
        for (int v = 0; v < BLOCK; v += VL<Real>)
            store(scores + v, load(scores + v) * scale + away(v, distance) * -slope);
    }

    void add_bias_and_mask(int64_t key, Real *scores) const {
        const int64_t limit = 1 << 30, distance = position - key;  // a mask need not tell apart what is farther than that
        const int window = call.window ? (int)std::min(call.window, limit) : INT32_MAX;
        const int held = (int)std::max(-limit, std::min(distance, limit));
        const bool hidden = call.key_mask && !call.key_mask[b * call.S + key];
        const int32_t *segments = call.query_segments ? call.query_segments + b * call.T + n * BLOCK : nullptr;
        const Real scale = (Real)call.scale, right = looks_right ? right_slope : Real(0);
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Ints<Real> apart = lanes() + (held + v), to_right = apart < 0;
            const Reals<Real> apart_by = away(v, distance), bias = to_right ? apart_by * right : apart_by * -slope;
            const Reals<Real> score = load(scores + v) * scale + bias;
            Ints<Real> unseen = (apart >= window) | (apart <= -window);
            if (!looks_right) unseen |= to_right;
            if (hidden) unseen |= -1;
            if (segments) {
                Ints<Real> own = {};
                for (int i = 0; i < VL<Real> && v + i < rows; i++) own[i] = segments[v + i];
                unseen |= own != call.key_segments[b * call.S + key];
            }
            store(scores + v, unseen ? every<Real>(-INFINITY) : score);
        }
    }
};

// Keys [low, high), at most BLOCK at a time and from the end on: meet(key, count), no call with keys on both sides of a cut.
template <typename Meet>
void for_keys(int64_t low, int64_t high, int64_t cut, int64_t other_cut, const Meet &meet) {
    for (int64_t stop = high; stop > low;) {
        int64_t start = std::max(low, stop - BLOCK);
        if (start < cut && cut < stop) start = cut;
        if (start < other_cut && other_cut < stop) start = other_cut;
        meet(start, (int)(stop - start));
        stop = start;
    }
}

// What outlying tile p has outside of the band, before it and behind it: part(low, high).
template <typename Real, typename Part>
void for_parts_of_tile(const Block<Real> &block, int p, const Part &part) {
    const int64_t near = block.range[0], far = block.range[1], tile = block.outliers[p];
    const int64_t low = std::max<int64_t>(block.range[2], tile * BLOCK);
    const int64_t high = std::min<int64_t>(block.range[3], (tile + 1) * BLOCK);
    if (tile < 0) return;
    if (low < std::min(high, near)) part(low, std::min(high, near));
    if (std::max(low, far) < high) part(std::max(low, far), high);
}

// `met`, in numbers of scores, to what is counted for the head of a block.
template <typename Real>
void count(const Block<Real> &block, int64_t met) {
    if (!block.call.met) return;
    int64_t &total = block.call.met[block.b * block.call.H + block.h];
#pragma omp atomic
    total += met;
}
