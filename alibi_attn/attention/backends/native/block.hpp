// A block of queries, and its scores with a few keys.
//
// Scores are stored transposed, [keys][BLOCK]: the queries of a block are the vector lanes, so a maximum or a sum over keys runs
// down a column, and keys and values are read in place.

#pragma once

#include <cstdlib>

#include "allowed.hpp"
#include "origins.hpp"
#include "space.hpp"
#include "tiles_bf16.hpp"

#ifdef ALIBI_COUNT  // a build of the tests: how many scores were computed
extern int64_t alibi_counted;
#endif

// The rows of a bf16 call in their real type.
template <typename Real>
Rows<const Bf16> in_bf16(const Rows<const Real> &rows) {
    return {reinterpret_cast<const Bf16 *>(rows.at), rows.sequence, rows.head, rows.row};
}

// One block of queries of one head.
template <typename Real>
struct Block {
    const Call<Real> &call;
    Real *queries;                // [D][BLOCK], times `scale_before`; zeros beyond the last; of bf16 [D / 2][BLOCK] pairs
    Pair *woven;                  // [BLOCK / 2][D] pairs: keys or values of a call in bf16
    const BestKeys<Real> &best_keys;  // of all heads
    int64_t b = 0, h = 0, k = 0, n = 0;
    int64_t position = 0;  // of the first query
    int rows = 0;
    Real slope = 0, right_slope = 0;
    bool looks_right = false;
    // The scale in two factors: a power of two, at most 1 and at most |scale|, which rounds nothing and keeps products from
    // overflowing before scores do; and the rest, which is applied to the scores.
    Real scale_before = 1, scale_after = 1;
    // Distances are relative to this one: if all keys are far away on one side, the distance of the nearest pair (negative to the
    // right), else 0. Then scores are off by their own rounding, not by that of slope times 10^6. The constant is added to lse.
    int64_t bias_origin = 0;
    // The biases of the head's keys, or null, and the origin to which they are relative: scores are off by the rounding of the
    // difference, however large both are.
    const double *key_bias = nullptr;
    double key_bias_origin = 0;
    // If no single origin is close to what every query needs: the bias and the slope times distance of each query's own best key,
    // to which its scores are relative. Lanes without a query are relative to infinity, so their weights are 0.
    bool origins_differ = false;
    double bias_of_row[BLOCK] = {}, nats_of_row[BLOCK] = {};
    BlockPoints<Real> points = {};  // of a call in space
    KeyRange range = {};
    int outlier_bits = 0;
    const int32_t *outlier_tiles = nullptr;

    // For backward the band and the outlier tiles are the ones that `measured.hpp` kept.
    void begin(int64_t sequence, int64_t head, int64_t block, bool backward = false) {
        b = sequence, h = head, k = head / (call.H / call.K), n = block;
        const int64_t at = b * call.H + h;
        position = call.first[b] + n * BLOCK;
        rows = (int)std::min<int64_t>(BLOCK, call.T - n * BLOCK);
        slope = call.slopes[at], right_slope = call.right_slopes[at];
        looks_right = !call.causal && !std::isinf(right_slope);
        const Visited<Real> visited = {call};
        range = visited.ranges(b, h)[n], outlier_bits = 0;
        if (backward) {
            const KeptBand &kept = visited.kept_bands(b, h)[n];
            range.first = kept.first, range.end = kept.end, outlier_bits = visited.kept_outlier_bits(b, h)[n];
        }
        outlier_tiles = visited.outlier_tiles(b, k);
        bias_origin = std::max<int64_t>(0, position - (range.high - 1)) + std::min<int64_t>(0, position + rows - 1 - range.low);
        if (call.table) bias_origin = 0;
        if (call.key_points) bias_origin = 0, points.begin(call.query_points + AXES * (b * call.T + n * BLOCK), rows, slope);
        key_bias = call.key_bias ? call.key_bias + at * call.S : nullptr;
        key_bias_origin = 0, origins_differ = false;
        if (!best_keys.empty()) choose_origins();
        int exponent = 0;
        std::frexp(call.scale, &exponent);
        scale_before = (Real)std::ldexp(1.0, std::max(-100, std::min(0, exponent - 1)));  // then |scale_after| is in [1, 2)
        scale_after = (Real)(call.scale / scale_before);
        transpose(call.query, scale_before, queries);
    }

    // The constant that `bias_origin` excludes from the scores, in nats.
    double bias_of_origin() const {
        return bias_origin > 0 ? -double(slope) * bias_origin : looks_right ? double(right_slope) * bias_origin : 0.0;
    }

    // The constant that is excluded from the scores of a query, in nats.
    double left_out_of_scores(int i) const {
        return origins_differ ? bias_of_row[i] - nats_of_row[i] : bias_of_origin() + key_bias_origin;
    }

    // If origins differ: the constant excluded from the block's scores, less that excluded from a query's scores.
    double origin_below_block(int i) const { return (key_bias_origin - bias_of_row[i]) + nats_of_row[i]; }

    // One origin for all queries of the block if it is close to the best visible key of each, else one per query.
    void choose_origins() {
        BestKey best[BLOCK];
        const double right = looks_right ? double(right_slope) : 0.0;
        const BlockOrigins<Real> origins = {
            call, best_keys, b, h, n * BLOCK, position, rows, range.low, range.high, slope, right, looks_right};
        origins.find(best);
        double least = INFINITY, most = -INFINITY;
        for (int i = 0; i < BLOCK; i++) {
            const bool blind = i >= rows || best[i].key < 0;
            bias_of_row[i] = i >= rows ? INFINITY : blind ? 0.0 : best[i].bias;
            nats_of_row[i] = blind ? 0.0 : origins.taken(i, best[i].key);
            if (blind) continue;
            least = std::min(least, best[i].bias), most = std::max(most, best[i].bias);
            origins_differ |= !(std::abs(nats_of_row[i] + bias_of_origin()) <= NEAR_NATS);
        }
        key_bias_origin = least <= most ? least / 2 + most / 2 : 0.0;
        origins_differ |= most - key_bias_origin > NEAR_NATS;
        if (origins_differ) bias_origin = 0;
    }

    // In nats, relative to `key_bias_origin`; -inf for a key that may not be seen.
    double relative_bias(int64_t key) const { return key_bias[key] - key_bias_origin; }

    bool sees_any(int i) const {
        int64_t key = range.low;
        while (key < range.high && !sees(call, b, h, n * BLOCK + i, key)) key++;
        return key < range.high;
    }

    int64_t row() const { return (b * call.H + h) * call.T + n * BLOCK; }

    // The block's rows times `factor`, as [D][BLOCK]; for bf16 as [D / 2][BLOCK] pairs, with a power of two as `factor`.
    void transpose(const Rows<const Real> &from, Real factor, Real *to) const {
        if constexpr (InPairs<Real>::EXIST)
            if (call.bf16) return transpose_pairs(in_bf16(from), factor, reinterpret_cast<Pair *>(to));
        const Real *at = from.of(b, h, n * BLOCK);
        for (int64_t d = 0; d < call.D; d++) {
            for (int i = 0; i < rows; i++) to[d * BLOCK + i] = at[i * from.row + d] * factor;
            for (int i = rows; i < BLOCK; i++) to[d * BLOCK + i] = 0;
        }
    }

    // Whether the first of these keys has the position of the first query: then the scores of the first half of the queries with
    // the second half of the keys are hidden and need not be computed.
    bool is_triangle(int64_t key) const { return call.causal && key == position; }

    // scores[j][i] of `count` keys from `key` on, with the bias; -inf where the query may not see the key.
    void scores_with(int64_t key, int count, Real *scores) const {
        inner_products(call.key, key, count, queries, scores);
        add_bias(key, count, scores);
        if (call.table) add_table(key, count, scores);
#ifdef ALIBI_COUNT
        __atomic_fetch_add(&alibi_counted, int64_t(count) * rows, __ATOMIC_RELAXED);
#endif
    }

    void transpose_pairs(const Rows<const Bf16> &from, Real factor, Pair *to) const {
        for (int i = 0; i < BLOCK; i++) {
            const Pair *row = reinterpret_cast<const Pair *>(from.of(b, h, n * BLOCK + i));
            for (int64_t p = 0; p < call.D / 2; p += VL<Real>) {
                const int count = (int)std::min<int64_t>(VL<Real>, call.D / 2 - p);
                Pairs pairs = {};
                if (i < rows) pairs = InPairs<Real>::scaled(row + p, count, factor);
                for (int l = 0; l < count; l++) to[(p + l) * BLOCK + i] = pairs[l];
            }
        }
    }

    // For VL queries, after `transpose`.
    Reals<Real> squared_norms(int lane) const {
        Reals<Real> squares = {};
        if constexpr (InPairs<Real>::EXIST)
            if (call.bf16) {
                const Pair *at = reinterpret_cast<const Pair *>(queries) + lane;
                for (int64_t p = 0; p < call.D / 2; p++, at += BLOCK) {
                    const auto pairs = *(const Pairs *)at;
                    const Reals<Real> x = InPairs<Real>::first_of(pairs), y = InPairs<Real>::second_of(pairs);
                    squares += x * x + y * y;
                }
                return squares;
            }
        for (int64_t d = 0; d < call.D; d++) {
            const Reals<Real> x = load(queries + d * BLOCK + lane);
            squares += x * x;
        }
        return squares;
    }

    // Writes a query's output: `share` times a row of [D] sums.
    void write_output(int i, const Real *sums, Real share) const {
        if constexpr (InPairs<Real>::EXIST)
            if (call.bf16) {
                const auto &out = call.output;
                Bf16 *to = Rows<Bf16>{reinterpret_cast<Bf16 *>(out.at), out.sequence, out.head, out.row}.of(b, h, n * BLOCK + i);
                for (int64_t d = 0; d < call.D; d += VL<Real>) InPairs<Real>::round(to + d, load(sums + d) * share);
                return;
            }
        Real *to = call.output.of(b, h, n * BLOCK + i);
        for (int64_t d = 0; d < call.D; d++) to[d] = sums[d] * share;
    }

    // products[j][i] = x_j . y_i for `count` keys (or values) x from `key` on, and y from `transpose`; zeros where it is not
    // computed.
    void inner_products(const Rows<const Real> &from, int64_t key, int count, const Real *y, Real *products) const {
        if constexpr (InPairs<Real>::EXIST)
            if (call.bf16) {
                const Bf16 *x = in_bf16(from).of(b, k, key);
                const Pair *pairs = reinterpret_cast<const Pair *>(y);
                return each_key_with_each_query(
                    key, count, typename InPairs<Real>::Product{x, from.row, 2, pairs, BLOCK, products, BLOCK, nullptr});
            }
        each_key_with_each_query(
            key, count, Product<Real>{from.of(b, k, key), from.row, 1, y, BLOCK, products, BLOCK, nullptr});
    }

    template <typename P>
    OUTLINE void each_key_with_each_query(int64_t key, int count, P p) const {
        if (!is_triangle(key) || count <= HALF) return product<REPLACE>(count, BLOCK, (int)call.D, p);
        product<REPLACE>(HALF, BLOCK, (int)call.D, p);
        for (int j = HALF; j < count; j++) std::fill_n(p.c + j * BLOCK, +HALF, Real(0));
        p.a += HALF * p.a_row, p.b += HALF, p.c += HALF * BLOCK + HALF;
        product<REPLACE>(count - HALF, HALF, (int)call.D, p);
    }

    // to[i] = (factor[i]) to[i] + sum over the keys j of weights[j][i] x_j, for x from `key` on. For bf16 the weights are
    // [(count + 1) / 2][BLOCK] pairs of keys.
    template <Start start>
    void sum_over_keys(
        const Rows<const Real> &from, int64_t key, int count, const Real *weights, Real *to, const Real *factor) const {
        if constexpr (InPairs<Real>::EXIST)
            if (call.bf16) {
                InPairs<Real>::weave(in_bf16(from).of(b, k, key), from.row, count, call.D, woven);
                const Bf16 *pairs = reinterpret_cast<const Bf16 *>(weights);
                return over_keys<start>(
                    key, count, typename InPairs<Real>::Product{pairs, 2, 2 * BLOCK, woven, call.D, to, call.D, factor});
            }
        over_keys<start>(key, count, Product<Real>{weights, 1, BLOCK, from.of(b, k, key), from.row, to, call.D, factor});
    }

    template <Start start, typename P>
    void over_keys(int64_t key, int count, P p) const {
        if (!is_triangle(key) || count <= HALF || rows <= HALF) return product<start>(rows, (int)call.D, count, p);
        product<start>(HALF, (int)call.D, HALF, p);
        p.a += HALF * p.a_row, p.c += HALF * call.D;
        if (start == SCALE_AND_ADD) p.factor += HALF;
        product<start>(rows - HALF, (int)call.D, count, p);
    }

    // to[j] += sum over the queries i of weights[j][i] y_i; the rows of `to` are `row` numbers apart. For bf16 the weights are
    // [count][BLOCK] bf16, and y is given as `pairs` of queries, [BLOCK / 2][D].
    void sum_over_queries(const Rows<const Real> &from, const Pair *pairs, int64_t key, int count, const Real *weights, Real *to,
                          int64_t row) const {
        if constexpr (InPairs<Real>::EXIST)
            if (call.bf16) {
                const Bf16 *narrow = reinterpret_cast<const Bf16 *>(weights);
                return over_queries(
                    key, count, typename InPairs<Real>::Product{narrow, BLOCK, 2, pairs, call.D, to, row, nullptr});
            }
        over_queries(key, count, Product<Real>{weights, BLOCK, 1, from.of(b, h, n * BLOCK), from.row, to, row, nullptr});
    }

    template <typename P>
    void over_queries(int64_t key, int count, P p) const {
        if (!is_triangle(key) || count <= HALF || rows <= HALF) return product<ADD>(count, (int)call.D, rows, p);
        product<ADD>(HALF, (int)call.D, rows, p);
        p.a += HALF * p.a_row + HALF / P::STEP * p.a_depth, p.b += HALF / P::STEP * p.b_depth, p.c += HALF * p.c_row;
        product<ADD>(count - HALF, (int)call.D, rows - HALF, p);
    }

    // Every pair in [key, key + count) is seen, and to the left.
    bool is_full(int64_t key, int count) const {
        if (call.key_mask || call.key_segments || key + count - 1 > position) return false;
        // Of whole blocks, so that a score rounds in the last block as it would if the text went on.
        return !call.window || position + BLOCK - 1 - key < call.window;
    }

    // scores = scale_after scores - m |i - j| + the bias of the key, or -inf where the query may not see the key.
    void add_bias(int64_t key, int count, Real *scores) const {
        if (call.key_points) return add_distances(key, count, scores);
        const bool full = is_full(key, count);
        const double largest = std::numeric_limits<Real>::max();  // only for a key that no query of the block sees
        Real of_rows[BLOCK];
        for (int j = 0; j < count; j++, scores += BLOCK) {
            const Real own = key_bias ? (Real)std::min(relative_bias(key + j), largest) : Real(0);
            if (key_bias && key_bias[key + j] == -INFINITY) {
                std::fill_n(scores, +BLOCK, Real(-INFINITY));
            } else if (origins_differ) {
                find_biases_of_rows(key + j, of_rows);
                full ? add_biases(of_rows, scores) : add_bias_and_mask(key + j, own, of_rows, scores);
            } else if (!full) {
                add_bias_and_mask(key + j, own, nullptr, scores);
            } else if (key_bias) {
                add_bias_to_left(position - bias_origin - key - j, own, scores);
            } else {
                add_bias_to_left(position - bias_origin - key - j, scores);
            }
        }
    }

    // act(distance) for keys from `key` on, where distance(j, v) is |p_i - p_j| of the j-th key and VL queries.
    template <typename Act>
    INLINE void in_space(int64_t key, int count, const Act &act) const {
        const double *from = call.key_points + AXES * (b * call.S + key);
        if (points.is_wide) return act([&](int j, int v) { return points.exact_distances(from + AXES * j, v); });
        Real places[BLOCK][AXES];
        bool in_plane = points.in_plane;
        for (int j = 0; j < count; j++) {
            for (int a = 0; a < AXES; a++) places[j][a] = Real(from[AXES * j + a] - points.origin[a]);
            in_plane &= places[j][AXES - 1] == 0;
        }
        if (in_plane) return act([&](int j, int v) { return points.template distances<AXES - 1>(places[j], v); });
        act([&](int j, int v) { return points.template distances<AXES>(places[j], v); });
    }

    OUTLINE void add_distances(int64_t key, int count, Real *scores) const {
        in_space(key, count, [&](const auto &distance) {
            for (int j = 0; j < count; j++)
                for (int v = 0; v < BLOCK; v += VL<Real>) {
                    Real *at = scores + j * BLOCK + v;
                    store(at, load(at) * scale_after - distance(j, v) * slope);
                }
        });
        const int32_t *segments = call.query_segments ? call.query_segments + b * call.T + n * BLOCK : nullptr;
        for (int j = 0; j < count && (segments || call.key_mask); j++, scores += BLOCK) {
            const bool hidden = call.key_mask && !call.key_mask[b * call.S + key + j];
            for (int i = 0; i < BLOCK; i++)
                if (hidden || (segments && i < rows && segments[i] != call.key_segments[b * call.S + key + j]))
                    scores[i] = -INFINITY;
        }
    }

    // For one key and every query: the key's bias and the slope's, less those of the query's best key, computed in double.
    OUTLINE void find_biases_of_rows(int64_t key, Real *biases) const {
        const double left = -double(slope), right = looks_right ? double(right_slope) : 0.0;
        const double bias = key_bias ? key_bias[key] : 0.0;
        const double distance = double(position - key);
        for (int i = 0; i < BLOCK; i++) {
            const double away = distance + i, nats = away * (away < 0 ? right : left);
            biases[i] = (Real)((bias - bias_of_row[i]) + (nats_of_row[i] + nats));
        }
    }

    // The table's entries for one key and consecutive queries are adjacent.
    OUTLINE void add_table(int64_t key, int count, Real *scores) const {
        const Real *of_distance = call.table + h * call.distances + position - key - call.table_first;
        for (int j = 0; j < count; j++, scores += BLOCK)
            for (int v = 0; v < BLOCK; v += VL<Real>) store(scores + v, load(scores + v) + load(of_distance + v - j));
    }

    // i - j for VL queries, given the distance of query 0; in float it is rounded beyond 2^24.
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

    void add_biases(const Real *biases, Real *scores) const {
        for (int v = 0; v < BLOCK; v += VL<Real>) store(scores + v, load(scores + v) * scale_after + load(biases + v));
    }

    // `of_rows` are the biases if origins differ, else null.
    void add_bias_and_mask(int64_t key, Real own, const Real *of_rows, Real *scores) const {
        // Query i is `distance` + i away from the key. That may not fit int32, so lanes compare i: with the query at the key's
        // position, and with the nearest queries that the window hides before and beyond it, all clamped to the block.
        const int64_t distance = position - key, window = call.window ? call.window : int64_t(1) << 62;
        const auto query_at = [&](int64_t d) { return (int)std::max<int64_t>(-1, std::min<int64_t>(d - distance, BLOCK)); };
        const int at_key = query_at(0), before = query_at(-window), beyond = query_at(window);
        const bool hidden = call.key_mask && !call.key_mask[b * call.S + key];
        const int32_t *segments = call.query_segments ? call.query_segments + b * call.T + n * BLOCK : nullptr;
        const Real right = looks_right ? right_slope : Real(0);
        for (int v = 0; v < BLOCK; v += VL<Real>) {
            const Ints<Real> i = lanes() + v, to_right = i < at_key;
            const Reals<Real> apart_by = away(v, distance - bias_origin), bias = to_right ? apart_by * right : apart_by * -slope;
            const Reals<Real> score = load(scores + v) * scale_after + (of_rows ? load(of_rows + v) : bias + own);
            Ints<Real> unseen = (i >= beyond) | (i <= before);
            if (!looks_right) unseen |= to_right;
            if (hidden) unseen |= -1;
            if (segments) {
                Ints<Real> own = {};
                for (int l = 0; l < VL<Real> && v + l < rows; l++) own[l] = segments[v + l];
                unseen |= own != call.key_segments[b * call.S + key];
            }
            store(scores + v, unseen ? every<Real>(-INFINITY) : score);
        }
    }
};

// meet(key, count) for keys [low, high) from the end, in tiles whose borders are `border` plus multiples of BLOCK.
template <typename Meet>
void for_keys(int64_t low, int64_t high, int64_t border, const Meet &meet) {
    for (int64_t stop = high; stop > low;) {
        const int64_t beyond = (stop - border) % BLOCK, start = std::max(low, stop - (beyond > 0 ? beyond : beyond + BLOCK));
        meet(start, (int)(stop - start));
        stop = start;
    }
}

// part(low, high) for the keys of outlier tile p before the band and after it.
template <typename Real, typename Part>
void for_parts_of_tile(const Block<Real> &block, int p, const Part &part) {
    const KeyRange &range = block.range;
    const int64_t tile = block.outlier_tiles[p];
    const int64_t low = std::max<int64_t>(range.low, tile * BLOCK), high = std::min<int64_t>(range.high, (tile + 1) * BLOCK);
    if (tile < 0) return;
    if (low < std::min<int64_t>(high, range.first)) part(low, std::min<int64_t>(high, range.first));
    if (std::max<int64_t>(low, range.end) < high) part(std::max<int64_t>(low, range.end), high);
}
