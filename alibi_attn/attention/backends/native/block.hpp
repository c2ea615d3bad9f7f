// A block of queries, and its scores with a few keys.
//
// Scores lie transposed, [keys][BLOCK]: the queries of a block are the lanes of the vectors, so a maximum or a sum over keys goes
// down a column, and keys and values are read where they lie.

#pragma once

#include <cstdlib>
#include <vector>

#include "allowed.hpp"
#include "vectors.hpp"

#ifdef ALIBI_COUNT  // a build of the tests: how many scores were computed
extern int64_t alibi_counted;
#endif

constexpr double FAR_MORE = 1000;  // nats: a weight of e^-1000 is none

// The key of every tile whose bias counts most for queries on one side of it: its bias, what it comes to with the distance to
// position 0, and which key it is. Hidden keys are no keys.
struct TileBias {
    double bias = -INFINITY, nats = -INFINITY;
    int64_t key = -1;
};

// [B, H, 2, tiles], of queries to the right and to the left of the tiles; empty without biases.
template <typename Real>
std::vector<TileBias> tile_biases(const Call<Real> &call) {
    const int64_t tiles = (call.S + BLOCK - 1) / BLOCK;
    std::vector<TileBias> found(call.key_bias ? 2 * call.B * call.H * tiles : 0);
#pragma omp parallel for num_threads(call.threads)
    for (int64_t at = 0; at < (call.key_bias ? call.B * call.H : 0); at++) {
        const double slope = call.slopes[at], right_slope = call.right_slopes[at];
        const double *bias = call.key_bias + at * call.S;
        const uint8_t *mask = call.key_mask ? call.key_mask + at / call.H * call.S : nullptr;
        for (int64_t j = 0; j < call.S; j++) {
            if (mask && !mask[j]) continue;
            TileBias &left = found[2 * at * tiles + j / BLOCK], &right = found[(2 * at + 1) * tiles + j / BLOCK];
            const double nats = bias[j] + slope * double(j), right_nats = bias[j] - right_slope * double(j);
            if (nats > left.nats) left = {bias[j], nats, j};
            if (right_nats > right.nats) right = {bias[j], right_nats, j};
        }
    }
    return found;
}

// One block of queries of one head.
template <typename Real>
struct Block {
    const Call<Real> &call;
    Real *queries;                // [D][BLOCK], times `scale_before`; zeros beyond the last
    const TileBias *tile_biases;  // of all heads
    int64_t b = 0, h = 0, k = 0, n = 0;
    int64_t position = 0;  // of the first query
    int rows = 0;
    Real slope = 0, right_slope = 0;
    bool looks_right = false;
    // The scale in two: a power of two of at most 1 and at most |scale|, which rounds nothing and keeps products from overflowing
    // before scores do, and what is left for the scores.
    Real scale_before = 1, scale_after = 1;
    // Distances count from here on: where all keys are far, to one side, the distance of the nearest pair (negative to the
    // right), else 0. Scores are off by their own rounding then, and not by that of slope times 10^6; lse gets the constant back.
    int64_t bias_origin = 0;
    // The biases of the head's keys, or null, and the one from which they count, of a key that matters to the block: scores are
    // off by the rounding of the difference, however large both are.
    const double *key_bias = nullptr;
    double key_bias_origin = 0;
    // Where some queries do not see that key, far from the block: the bias from which the scores of each of them count, less
    // `key_bias_origin`. Nothing is skipped then, since certificates know one origin only.
    bool origins_differ = false;
    double origin_of_row[BLOCK] = {};
    KeyRange *range = nullptr;
    int32_t *outlier_bits = nullptr;
    const int32_t *outlier_tiles = nullptr;

    void begin(int64_t sequence, int64_t head, int64_t block) {
        b = sequence, h = head, k = head / (call.H / call.K), n = block;
        const int64_t at = b * call.H + h;
        position = call.first[b] + n * BLOCK;
        rows = (int)std::min<int64_t>(BLOCK, call.T - n * BLOCK);
        slope = call.slopes[at], right_slope = call.right_slopes[at];
        looks_right = !call.causal && !std::isinf(right_slope);
        const Visited<Real> visited = {call};
        range = visited.ranges(b, h) + n, outlier_bits = visited.outlier_bits(b, h) + n;
        outlier_tiles = visited.outlier_tiles(b, k);
        bias_origin = std::max<int64_t>(0, position - (range->high - 1)) + std::min<int64_t>(0, position + rows - 1 - range->low);
        key_bias = call.key_bias ? call.key_bias + at * call.S : nullptr;
        const TileBias origin = key_bias ? bias_that_matters() : TileBias{0, 0};
        key_bias_origin = origin.bias == -INFINITY ? 0 : origin.bias;
        find_origins_of_rows(origin.key);
        int exponent = 0;
        std::frexp(call.scale, &exponent);
        scale_before = (Real)std::ldexp(1.0, std::max(-100, std::min(0, exponent - 1)));  // then |scale_after| is in [1, 2)
        scale_after = (Real)(call.scale / scale_before);
        transpose(call.query, scale_before, queries);
    }

    // What `bias_origin` left out of the scores, in nats.
    double bias_of_origin() const {
        return bias_origin > 0 ? -double(slope) * bias_origin : looks_right ? double(right_slope) * bias_origin : 0.0;
    }

    // What was left out of the scores of a query, in nats.
    double left_out_of_scores(int i) const {
        return bias_of_origin() + key_bias_origin + (origins_differ ? origin_of_row[i] : 0);
    }

    // The largest of the keys where the block stands, of those that may be seen; that of a key farther away where it counts so
    // much more that none of those has any weight (they may be padding, with -10^9), and which key that is; -inf where none is
    // finite.
    TileBias bias_that_matters() const {
        const int64_t tiles = (call.S + BLOCK - 1) / BLOCK, at = 2 * (b * call.H + h) * tiles;
        const auto largest = [&](int64_t low, int64_t high) {
            TileBias found;
            for (int64_t j = std::max<int64_t>(range->low, low); j < std::min<int64_t>(range->high, high); j++) {
                if (call.key_mask && !call.key_mask[b * call.S + j]) continue;
                if (key_bias[j] > found.bias) found = {key_bias[j], key_bias[j]};
            }
            return found;
        };
        TileBias best = largest(position, position + rows);
        double enough = best.nats == -INFINITY ? -INFINITY : best.nats + FAR_MORE;
        const auto look = [&](const TileBias &tile, double nats) {
            if (nats > enough) best = {tile.bias, nats, tile.key}, enough = nats;
        };
        // Whole tiles only: of one that is partly hidden nobody knows which key it was.
        const int64_t first = (range->low + BLOCK - 1) / BLOCK, whole = range->high == call.S ? tiles : range->high / BLOCK;
        const int64_t end = position + rows - 1, behind = (std::max<int64_t>(range->low, end + 1) + BLOCK - 1) / BLOCK;
        for (int64_t t = std::min(whole, (position + BLOCK - 1) / BLOCK) - 1; t >= first; t--)
            if ((t + 1) * BLOCK <= position || position >= call.S)
                look(tile_biases[at + t], tile_biases[at + t].nats - double(slope) * position);
        for (int64_t t = behind; looks_right && t < whole; t++)
            look(tile_biases[at + tiles + t], tile_biases[at + tiles + t].nats + double(right_slope) * end);
        return best.bias == -INFINITY ? largest(range->low, range->high) : best;
    }

    bool sees(int i, int64_t key) const {
        const int64_t distance = position + i - key;
        if ((distance < 0 && !looks_right) || (call.window && std::abs(distance) >= call.window)) return false;
        if (call.key_mask && !call.key_mask[b * call.S + key]) return false;
        const int32_t *segments = call.query_segments;
        return !segments || segments[b * call.T + n * BLOCK + i] == call.key_segments[b * call.S + key];
    }

    // For queries that do not see the far key from which the block counts: that of the key that counts most of what they see.
    void find_origins_of_rows(int64_t far_key) {
        origins_differ = false;
        std::fill_n(origin_of_row, +BLOCK, 0.0);
        for (int i = 0; far_key >= 0 && i < rows; i++) {
            if (sees(i, far_key)) continue;
            TileBias best;
            for (int64_t j = range->low; j < range->high; j++) {
                const int64_t distance = position + i - j;
                const double nats = key_bias[j] + (distance < 0 ? double(right_slope) : -double(slope)) * double(distance);
                if (nats > best.nats && sees(i, j)) best = {key_bias[j], nats, j};
            }
            if (best.key >= 0) origin_of_row[i] = best.bias - key_bias_origin;
            origins_differ |= std::abs(origin_of_row[i]) > FAR_MORE;
        }
    }

    // In nats, relative to `key_bias_origin` and what is given; -inf for a key that may not be seen.
    double bias_of(int64_t key, double beside = 0) const {
        const double nats = key_bias[key] - key_bias_origin - beside;
        return nats == -INFINITY ? nats : std::max(-1e30, std::min(nats, 1e30));
    }

    int64_t row() const { return (b * call.H + h) * call.T + n * BLOCK; }

    // The block's rows times `factor`, as [D][BLOCK].
    void transpose(const Rows<const Real> &from, Real factor, Real *to) const {
        const Real *at = from.of(b, h, n * BLOCK);
        for (int64_t d = 0; d < call.D; d++) {
            for (int i = 0; i < rows; i++) to[d * BLOCK + i] = at[i * from.row + d] * factor;
            for (int i = rows; i < BLOCK; i++) to[d * BLOCK + i] = 0;
        }
    }

    // Whether the first of these keys stands where the first query does: then no query sees the keys after it, and the scores of
    // the first half of the queries with the second half of the keys need not be computed.
    bool is_triangle(int64_t key) const { return call.causal && key == position; }

    // scores[j][i] of `count` keys from `key` on, with the bias; -inf where the query may not look.
    void scores_with(int64_t key, int count, Real *scores) const {
        inner_products(call.key, key, count, queries, scores);
        add_bias(key, count, scores);
#ifdef ALIBI_COUNT
#pragma omp atomic
        alibi_counted += int64_t(count) * rows;
#endif
    }

    // products[j][i] = x_j . y_i for `count` keys (or values) x from `key` on, and y [D][BLOCK]; zeros in what is not computed.
    void inner_products(const Rows<const Real> &from, int64_t key, int count, const Real *y, Real *products) const {
        Product<Real> p = {from.of(b, k, key), from.row, 1, y, BLOCK, products, BLOCK, nullptr};
        if (!is_triangle(key) || count <= HALF) return product<REPLACE>(count, BLOCK, (int)call.D, p);
        product<REPLACE>(HALF, BLOCK, (int)call.D, p);
        for (int j = HALF; j < count; j++) std::fill_n(products + j * BLOCK, +HALF, Real(0));
        p.a += HALF * p.a_row, p.b += HALF, p.c += HALF * BLOCK + HALF;
        product<REPLACE>(count - HALF, HALF, (int)call.D, p);
    }

    // to[i] = (factor[i]) to[i] + sum over the keys j of weights[j][i] x_j, for x from `key` on.
    template <Start start>
    void sum_over_keys(
        const Rows<const Real> &from, int64_t key, int count, const Real *weights, Real *to, const Real *factor) const {
        Product<Real> p = {weights, 1, BLOCK, from.of(b, k, key), from.row, to, call.D, factor};
        if (!is_triangle(key) || count <= HALF || rows <= HALF) return product<start>(rows, (int)call.D, count, p);
        product<start>(HALF, (int)call.D, HALF, p);
        p.a += HALF, p.c += HALF * call.D;
        if (start == SCALE_AND_ADD) p.factor += HALF;
        product<start>(rows - HALF, (int)call.D, count, p);
    }

    // to[j] += sum over the queries i of weights[j][i] y_i; the rows of `to` are `row` numbers apart.
    void sum_over_queries(
        const Rows<const Real> &from, int64_t key, int count, const Real *weights, Real *to, int64_t row) const {
        Product<Real> p = {weights, BLOCK, 1, from.of(b, h, n * BLOCK), from.row, to, row, nullptr};
        if (!is_triangle(key) || count <= HALF || rows <= HALF) return product<ADD>(count, (int)call.D, rows, p);
        product<ADD>(HALF, (int)call.D, rows, p);
        p.a += HALF * BLOCK + HALF, p.b += HALF * p.b_depth, p.c += HALF * row;
        product<ADD>(count - HALF, (int)call.D, rows - HALF, p);
    }

    // Every pair in [key, key + count) is seen, and to the left.
    bool is_full(int64_t key, int count) const {
        if (call.key_mask || call.key_segments || origins_differ || key + count - 1 > position) return false;
        return !call.window || position + rows - 1 - key < call.window;
    }

    // scores = scale_after scores - m |i - j| + the bias of the key, or -inf where the query may not look.
    void add_bias(int64_t key, int count, Real *scores) const {
        const bool full = is_full(key, count);
        for (int j = 0; j < count; j++, scores += BLOCK) {
            const Real own = key_bias ? (Real)bias_of(key + j) : Real(0);
            if (own == -INFINITY)
                std::fill_n(scores, +BLOCK, own);
            else if (!full)
                add_bias_and_mask(key + j, own, scores);
            else if (key_bias)
                add_bias_to_left(position - bias_origin - key - j, own, scores);
            else
                add_bias_to_left(position - bias_origin - key - j, scores);
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
        for (int v = 0; v < BLOCK; v += VL<Real>) store(scores + v, load(scores + v) * scale_after + away(v, distance) * -slope);
    }

    void add_bias_to_left(int64_t distance, Real own, Real *scores) const {
        for (int v = 0; v < BLOCK; v += VL<Real>)
            store(scores + v, load(scores + v) * scale_after + (away(v, distance) * -slope + own));
    }

    void add_bias_and_mask(int64_t key, Real own, Real *scores) const {
        const int64_t limit = 1 << 30, distance = position - key;  // a mask need not tell apart what is farther than that
        const int window = call.window ? (int)std::min(call.window, limit) : INT32_MAX;
        const int held = (int)std::max(-limit, std::min(distance, limit));
        const bool hidden = call.key_mask && !call.key_mask[b * call.S + key];
        const int32_t *segments = call.query_segments ? call.query_segments + b * call.T + n * BLOCK : nullptr;
        const Real right = looks_right ? right_slope : Real(0);
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Ints<Real> apart = lanes() + (held + v), to_right = apart < 0;
            const Reals<Real> apart_by = away(v, distance - bias_origin), bias = to_right ? apart_by * right : apart_by * -slope;
            Reals<Real> owns = every(own);
            for (int i = 0; origins_differ && i < VL<Real>; i++) owns[i] = (Real)bias_of(key, origin_of_row[v + i]);
            const Reals<Real> score = load(scores + v) * scale_after + (bias + owns);
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

// What outlier tile p has outside of the band, before it and behind it: part(low, high).
template <typename Real, typename Part>
void for_parts_of_tile(const Block<Real> &block, int p, const Part &part) {
    const KeyRange &range = *block.range;
    const int64_t tile = block.outlier_tiles[p];
    const int64_t low = std::max<int64_t>(range.low, tile * BLOCK), high = std::min<int64_t>(range.high, (tile + 1) * BLOCK);
    if (tile < 0) return;
    if (low < std::min<int64_t>(high, range.first)) part(low, std::min<int64_t>(high, range.first));
    if (std::max<int64_t>(low, range.end) < high) part(std::max<int64_t>(low, range.end), high);
}
