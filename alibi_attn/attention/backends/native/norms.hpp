// Upper bounds of the norms of keys and values, per tile; `attention/certificate/norms.py` in C++.

#pragma once

#include "block.hpp"

enum { STATS = OUTLIER_TILES + 4 };

// An upper bound of the norm of a row of finite numbers from the sum of its squares, or inf; see `norms.norm_bound`.
template <typename Real>
Real norm_bound(Real squares, int64_t D) {
    return std::sqrt(squares) * (1 + (D + NORM_UNITS) * UNIT<Real>) + std::sqrt(Real(D)) * VANISHING<Real>;
}

// The same for a row in memory: x(d) loads its numbers from d on.
template <typename Real, typename Numbers>
Real norm_of_numbers(int64_t D, const Numbers &x) {
    Reals<Real> sum = {};
    for (int64_t d = 0; d < D; d += VL<Real>) sum += x(d) * x(d);
    Real squares = 0;
    for (int i = 0; i < VL<Real>; i++) squares += sum[i];
    return norm_bound(squares, D);
}

template <typename Real>
Real norm_of_row(const Call<Real> &call, const Rows<const Real> &rows, int64_t b, int64_t h, int64_t i) {
    if constexpr (InPairs<Real>::EXIST)
        if (call.bf16) {
            const Bf16 *row = in_bf16(rows).of(b, h, i);
            return norm_of_numbers<Real>(call.D, [&](int64_t d) { return InPairs<Real>::widened(row + d); });
        }
    const Real *row = rows.of(b, h, i);
    return norm_of_numbers<Real>(call.D, [&](int64_t d) { return load(row + d); });
}

// The norms of a key head's keys and values, for all of its blocks. Hidden keys are excluded.
template <typename Real>
struct Norms {
    const Real *keys, *values;  // [padded S]: upper bounds of norms; for a hidden key a large negative number, and 0
    const Real *stats;          // the norms of the OUTLIER_TILES + 1 tiles with the longest keys, descending; then of the
                                // shortest key, the longest value and the shortest value
    const int32_t *tiles;       // [OUTLIER_TILES]: those tiles, -1 = none

    Real longest_without(int tiles) const { return stats[tiles]; }
    Real shortest_key() const { return stats[OUTLIER_TILES + 1]; }
    Real longest_value() const { return stats[OUTLIER_TILES + 2]; }
    Real shortest_value() const { return stats[OUTLIER_TILES + 3]; }
};

template <typename Real>
int64_t padded(const Call<Real> &call) {
    return (call.S + 2 * TAIL_GROUP - 1) / TAIL_GROUP * TAIL_GROUP;
}

// The size of a key head's norms and stats.
template <typename Real>
int64_t norms_size(const Call<Real> &call) {
    return 2 * padded(call) + STATS;
}

template <typename Real>
Norms<Real> norms_of(const Call<Real> &call, Real *memory, int64_t head) {
    const Real *keys = memory + head * norms_size(call);
    const int32_t *tiles = Visited<Real>{call}.outlier_tiles(head / call.K, head % call.K);
    return {keys, keys + padded(call), keys + 2 * padded(call), tiles};
}

// Computes the norms of keys [from, to) of a key head, and of their values.
template <typename Real>
void measure(const Call<Real> &call, Real *memory, int64_t head, int64_t from, int64_t to) {
    const int64_t b = head / call.K, k = head % call.K;
    Real *keys = memory + head * norms_size(call), *values = keys + padded(call);
    for (int64_t j = from; j < to; j++) {
        const bool hidden = j >= call.S || (call.key_mask && !call.key_mask[b * call.S + j]);
        keys[j] = hidden ? Real(-1e30) : norm_of_row(call, call.key, b, k, j);
        values[j] = hidden || !call.has_values ? Real(0) : norm_of_row(call, call.value, b, k, j);
    }
}

// Computes the stats and outlier tiles of a key head from its norms.
template <typename Real>
void summarize(const Call<Real> &call, Real *memory, int64_t head) {
    const Norms<Real> of = norms_of(call, memory, head);
    Real *stats = memory + head * norms_size(call) + 2 * padded(call), top[OUTLIER_TILES + 1] = {};
    Real shortest = INFINITY, longest_value = 0, shortest_value = INFINITY;
    int32_t tiles[OUTLIER_TILES + 1];
    std::fill(tiles, tiles + OUTLIER_TILES + 1, -1);
    for (int64_t tile = 0; tile * BLOCK < call.S; tile++) {
        Real norm = 0;
        for (int64_t j = tile * BLOCK; j < std::min((tile + 1) * BLOCK, call.S); j++) {
            if (of.keys[j] < 0) continue;
            norm = std::max(norm, of.keys[j]), shortest = std::min(shortest, of.keys[j]);
            longest_value = std::max(longest_value, of.values[j]), shortest_value = std::min(shortest_value, of.values[j]);
        }
        int at = OUTLIER_TILES;  // its rank among the longest so far
        if (tiles[at] >= 0 && !(norm > top[at])) continue;
        for (; at > 0 && (tiles[at - 1] < 0 || norm > top[at - 1]); at--) top[at] = top[at - 1], tiles[at] = tiles[at - 1];
        top[at] = norm, tiles[at] = (int32_t)tile;
    }
    std::copy(top, top + OUTLIER_TILES + 1, stats);
    const Real rest[] = {std::isfinite(shortest) ? shortest : 0, longest_value, shortest_value};
    std::copy(rest, rest + 3, stats + OUTLIER_TILES + 1);
    std::copy(tiles, tiles + OUTLIER_TILES, Visited<Real>{call}.outlier_tiles(head / call.K, head % call.K));
}

// The norms, stats and outlier tiles of all key heads, by all members of a team.
template <typename Real>
void measure_all(const Call<Real> &call, Real *memory, Member &member) {
    const int64_t heads = call.B * call.K, width = 512, parts = (padded(call) + width - 1) / width;
    member.for_each(heads * parts, [&](int64_t part) {
        const int64_t from = part % parts * width;
        measure(call, memory, part / parts, from, std::min(from + width, padded(call)));
    });
    member.for_each(heads, [&](int64_t head) { summarize(call, memory, head); });
}
